"""What makes a job faster: memory, convolutions, compilation, cores."""
