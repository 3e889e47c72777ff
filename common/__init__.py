"""What every job needs and nobody edits."""
