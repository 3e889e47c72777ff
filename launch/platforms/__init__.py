"""`launch submit`: jobs on managed platforms."""
