"""A run: its arguments, its folder, its reports and metrics."""
