"""The exact state of a training: its files, its digest, and what all ranks agree on in each step.

Takes: a loader whose step k has the same samples at every start; a model, an optimizer and further objects
whose state_dict() has tensors and plain types; the same program at each restart.
Gives: the state of a run without an interruption, bit for bit, after any number of restarts; a line in
state.jsonl for each state that was saved or evaluated.
Outside, and refused with both values when a checkpoint is chosen (restore.py, other_start.py, recorded.py):
other options that count, other data, other names, shapes or places of parameters, a state of another run.
Outside, and not seen: what the loop changes in an object that was not given to Exact, nor to add().
"""
