"""Pure functions that choose the samples of a step and their augmentation, and the receipt of both."""
