"""What the bits of a run depend on beside its code and data: threads, instruction sets, versions, GPU."""
