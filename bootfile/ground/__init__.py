"""Exit codes, files and long waits: what every other room uses."""
