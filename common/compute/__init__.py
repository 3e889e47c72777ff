"""Networks, optimizers and precision."""
