"""Pure functions that choose the samples of a step and the random numbers of each sample.

Takes: seed, epoch, step, rank and world size.
Gives: ids and random numbers that depend on nothing else: every rank, start and number of workers gets the
same.
Outside: state. Only Positions count, and they can be set.
"""
