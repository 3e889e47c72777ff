"""A step over several processes: exact sums, sharded models, BatchNorm, gradients, compilation."""
