"""Networks, optimizers and precision.

A job takes its network, its optimizer and its type of mixed precision from here, by its options. What a
network cannot take (a size of images, a batch of one) is refused by check() of classifiers.py, before the
training. The step itself, and what is finite in it, is Exact's (bootfile/exact).
"""
