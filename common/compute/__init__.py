"""Networks, optimizers, precision and compilation."""
