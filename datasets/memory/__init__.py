"""Data sets that fit in memory: CIFAR-10, digits, Fashion-MNIST, and windows of tokens.

load() takes the user's path or URL, or None for a default, and gives (training set, test set) on every rank.
Official files are checked by MD5; pickles are read without running their code. Outside are other data sets: a
job takes any map-style Dataset in their place.
"""
