"""Make a job faster: compilation and mixed precision."""
