"""`launch data`: the samples of a step of a run, the steps of a sample, the largest losses.

It takes the output folder of a run, which it only reads, and the data of the run. Each answer is compared
with the receipt of the run before it is printed. Outside, and refused: data with another fingerprint, and
steps without a receipt. Of a Dataset of the user only the ids are known.
"""
