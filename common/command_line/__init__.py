"""What a command line asks for besides a job's own options: --help without waiting, and --config."""
