"""The processes of a run: their ranks, values that all of them agree on, and the signals that stop them."""
