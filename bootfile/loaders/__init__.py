"""The loader of a training loop: batches on the device, with their step and a receipt.

Takes: a map-style Dataset (numbered items, a length), or a DataLoader of one; items are (input, target), or a
dictionary with a target, and depend on their number and on the global generators only.
Gives: the batches of the steps first + 1, first + 2, ... of a run, the same at every start, with any number
of workers; Loader.receipt names the samples of each step.
Outside, and refused when the loader is made: streams (IterableDataset), persistent workers, items without
numbers. Items that draw from something else differ when they are read twice: a warning.
"""
