"""Checkpoints of a job: its options, weights, and results at a URL."""
