"""What the bits of a run depend on, apart from code and data: threads, instruction sets, versions, GPU.

Takes: this process and its machine (Linux; others have fewer facts).
Gives: facts.describe(), which checkpoints, receipts and proofs hold; the number of threads and cores that a
process may use; kernels that are the same on several kinds of CPUs (levels.py, vector_math.py) or that do not
damage memory (convolution.py).
Outside: which bits a GPU computes. Its name and its settings are facts, and nothing is promised between two
kinds.
"""
