"""`launch report`: make one page of runs."""
