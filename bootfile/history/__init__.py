"""What can be asked of an old run: begin another one at a step of it, and compute steps of it again."""
