"""What the bits of a run depend on, apart from code and data: threads, instruction sets, versions, GPU."""
