"""How weights learn: optimizers by name, and clipped gradients."""
