"""Engines: produce the uint8 batches of a plan.

An engine takes a store, or a data set in memory, and in each epoch a plan, whose batches have ids, boxes and
flips. It yields (batch, images uint8 [n, H, W, C]) in order. It draws no random numbers and normalises
nothing. Outside is a sample that cannot be decoded: the error names its file.
"""
