"""Augmentation as pure functions of (seed, epoch, sample id).

augment.py gives crops and flips, effects.py the parameters of changes of pixels, as integers. The same
arguments give the same values on every device, at any world size and after any restart. Which samples a step
has is decided in bootfile/sampling; the pixels are changed in datasets/loaders/pixels.py.
"""
