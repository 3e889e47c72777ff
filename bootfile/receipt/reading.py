"""Read the receipt in the output folder of a run, of a Loader or of a plain loop, without torch."""

import os
from collections import Counter

import numpy as np

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, read_file
from bootfile.histories import describe_parent, parent_of
from bootfile.receipt.records import FILE, LOOP_FILE, MOST, RECORD, SAMPLES_FILE, parse_records
from bootfile.receipt.steps import History, Start, Steps
from bootfile.records import read_starts

LOOP = LOOP_FILE.format(0)  # the receipt of a plain loop has this file


def find_receipt(folder: str) -> str:
    """Return the name of the receipt in a run's folder, "" without one: FILE or LOOP."""
    return next((name for name in (FILE, LOOP) if os.path.exists(os.path.join(folder, name))), "")


def read(folder: str) -> History:
    """Return the starts and the steps of a run. Raises BadInput."""
    if find_receipt(folder) == LOOP:
        return _read_loop(folder)
    steps = Steps(read_records(folder))
    starts = read_starts(folder, whole=True)  # a receipt that was copied alone has none
    parent = parent_of(starts)
    # a run that begins at a step of another run: its records begin after the state of that
    begin = parent["state"] if parent else min((start["step"] for start in starts), default=0)
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


def _read_loop(folder: str) -> History:
    """Return the starts of a plain loop that have steps, each with the samples of all ranks."""
    starts = _read_rank(folder, 0)
    most = max(start.world_size for start in starts)  # a restart may have another world size
    others = [_read_rank(folder, rank) for rank in range(1, most)]
    whole = []
    for start in starts:
        # The files of the ranks do not say which starts belong together: those that are nearest in time do.
        # If a rank was killed before its first batch, its nearest start belongs to another start of rank 0.
        parts = [_find_nearest(rank_starts, start.time) for rank_starts in others[: start.world_size - 1]]
        is_complete = all(_find_nearest(starts, part.time) is start for part in parts)
        steps = _merge([start.steps, *(part.steps for part in parts)]).renumber(start.first or 0)
        if len(steps) and is_complete:
            whole.append(start._replace(steps=steps))
    if not whole:
        raise BadInput(f"the receipt in {folder} holds no step of all processes")
    return History(whole, len(whole) - 1)


def _find_nearest(starts: list[Start], moment: int) -> Start:
    return min(starts, key=lambda start: abs(start.time - moment))


def _read_rank(folder: str, rank: int) -> list[Start]:
    """Return the starts of one rank, with its own samples."""
    path = os.path.join(folder, LOOP_FILE.format(rank))
    samples_path = os.path.join(folder, SAMPLES_FILE.format(rank))
    with explained(f"no receipt of a loop at {path} and {samples_path}"):
        with open(path, "rb") as file:
            records, is_cut = parse_records(file.read())
        hashes = np.fromfile(samples_path, "<u8")
    # a record of step 0 begins a start of the program; then the steps follow each other
    heads = np.flatnonzero(records["step"] == 0)
    before, *parts = np.split(records, heads)
    sizes = np.where(records["step"] > 0, records["sums"][:, 1], 0).astype(np.int64)
    is_whole = not is_cut and len(parts) and not len(before) and (sizes >= 0).all()
    follow = all(np.array_equal(part["step"], np.arange(len(part))) for part in parts)
    if not is_whole or not follow or sizes.sum() > len(hashes):
        raise BadInput(f"{path} is cut or damaged: expected starts with ascending steps, and their samples")
    samples = np.split(hashes, np.cumsum(sizes))
    starts = []
    for begin, part in zip(heads.tolist(), parts, strict=True):
        world_size, seed, time = part["sums"][0].tolist()
        of_steps = samples[begin + 1 : begin + len(part)]
        steps = Steps(part[1:], of_steps, [(len(hashes),) for hashes in of_steps])
        # 0 stands for an unknown number of completed steps, or no seed
        first = int(part["epoch"][0]) - 1 if part["epoch"][0] else None
        starts.append(Start(first, world_size, seed - 1 if seed else None, time, steps))
    return starts


def _merge(ranks: list[Steps]) -> Steps:
    """Return the steps that all ranks have reached, each with the samples of all ranks."""
    parts: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}
    ends = []
    for steps in ranks:
        # a step of all ranks has the same epoch and the same place in it
        counts = Counter[int]()  # epoch -> its steps so far
        key = (0, 0)
        for epoch, sums, samples in zip(steps.epochs.tolist(), steps.sums, steps.samples, strict=True):
            counts[epoch] += 1
            key = epoch, counts[epoch]
            parts.setdefault(key, []).append((sums, samples))
        ends.append(key)
    # a kill may end the ranks at different steps: not all of them made the rest
    keys = [key for key in sorted(parts) if key <= min(ends)]
    records = np.zeros(len(keys), RECORD)
    hashes = []
    for place, key in enumerate(keys):
        records["epoch"][place] = key[0]
        records["sums"][place] = np.sum([sums for sums, _ in parts[key]], axis=0)  # modulo 2^64
        hashes.append([samples for _, samples in parts[key]])
    return Steps(records, [*map(np.concatenate, hashes)], [tuple(map(len, step)) for step in hashes])
