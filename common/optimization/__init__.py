"""Optimizers by name, clipped gradients, and averaged weights."""
