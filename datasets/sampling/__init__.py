"""Which samples a step reads and how they are augmented: pure functions, and their receipt."""
