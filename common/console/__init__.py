"""Parse command lines and settings files."""
