"""Make a job faster: memory, convolutions, compilation, mixed precision."""
