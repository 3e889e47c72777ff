"""Engines: produce the uint8 batches of a plan."""
