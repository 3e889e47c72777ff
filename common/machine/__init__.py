"""What the bits of a run depend on, apart from its code and data: threads, instruction sets, versions, GPU."""
