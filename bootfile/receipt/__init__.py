"""The receipt of a run: which samples each step was given; reading, judging and comparing of receipts."""
