"""Parts of the command line that all jobs share: --help without importing torch, and --config."""
