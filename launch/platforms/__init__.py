"""`launch submit`, `status`, `logs` and `stop`: jobs on managed platforms."""
