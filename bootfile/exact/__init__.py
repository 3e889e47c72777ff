"""The exact state of a training: its files, its digest, and what all ranks agree on in each step."""
