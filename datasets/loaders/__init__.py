"""Loaders: turn the samples of stores into batches on the device."""
