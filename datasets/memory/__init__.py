"""Data sets that fit in memory."""
