"""Send the figures of a run to trackers."""
