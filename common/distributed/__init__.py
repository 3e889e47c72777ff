"""Processes: who they are, how they start, meet, communicate and stop."""
