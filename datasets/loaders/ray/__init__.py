"""Workers on actors of Ray: pool.py connects and orders the tasks, engine.py has the loaders.

It takes a data set that can be pickled, and the address of a cluster, and gives batches in order. A batch
depends on the seed and its number, so another actor computes the same one if a worker is lost. Outside is a
cluster whose head is lost: the job ends with exit code 5, and its restart continues.
"""
