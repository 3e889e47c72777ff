"""Read the receipt in the output folder of a run, of a Loader or of a plain loop."""

import os

import numpy as np

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, read_file
from bootfile.receipt import loop_records
from bootfile.receipt.records import FILE, LOOP_FILE, MOST, parse_records
from bootfile.receipt.steps import History, Start, Steps
from bootfile.records import describe_parent, parent_of, read_starts

LOOP = LOOP_FILE.format(0)  # the receipt of a plain loop has this file


def find_receipt(folder: str) -> str:
    """Return the name of the receipt in a run's folder, "" without one: FILE or LOOP."""
    for name in (FILE, LOOP):
        if os.path.exists(os.path.join(folder, name)):
            return name
    return ""


def read(folder: str) -> History:
    """Return the starts and the steps of a run. Raises BadInput."""
    if find_receipt(folder) == LOOP:
        return loop_records.read(folder)
    steps = Steps(read_records(folder))
    starts = read_starts(folder, whole=True)  # a receipt that was copied alone has none
    parent = parent_of(starts)
    begin = min((start["step"] for start in starts), default=0)
    if parent:  # a run that begins at a step of another run: its records begin after the state of that
        begin = parent["state"]
    # a Loader's receipt has one record of a step, whichever start made it: seed and time are not known
    whole = Start(first=None, world_size=1, seed=None, time=0, steps=steps)
    return History([whole], max(0, len(starts) - 1), begin, describe_parent(parent, steps.last))


def read_records(folder: str) -> np.ndarray:
    """Return the records of a Loader's receipt in an output folder, RECORD [n]; steps ascend. Raises
    BadInput."""
    path = os.path.join(folder, FILE)
    with explained(f"no receipt of a run at {path}"):
        records, is_cut = parse_records(read_file(path, MOST))
    if is_cut or not len(records) or (np.diff(records["step"].astype(np.int64)) <= 0).any():
        raise BadInput(f"{path} is empty, cut or not a receipt: expected records with ascending steps")
    return records
