"""Show the samples of a step of a run, or the steps of a sample, checked against the receipt of the run."""
