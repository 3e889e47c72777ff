"""Loaders: turn the samples of stores into batches on the device.

A job gives its options and an index, and gets loaders of normalised batches: backends.py chooses the engine
(engines/), image_loader.py moves and normalises, pixels.py applies effects. The plan decides samples, crops
and effects, so every engine but synthetic has the same ones; backends round pixels differently. Outside are
other kinds of samples than images: bootfile/loaders/map_style.py loads them.
"""
