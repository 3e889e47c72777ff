"""Pure functions that choose the samples of a step and the random numbers of each sample."""
