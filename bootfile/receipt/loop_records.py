"""Read the receipt of a plain loop, without torch."""

import os
from collections import Counter

import numpy as np

from bootfile.receipt.records import LOOP_FILE, RECORD, SAMPLES_FILE, ReceiptError, parse_records
from bootfile.receipt.steps import History, Start, Steps


def read(folder: str) -> History:
    """Return the starts that have steps, each with the samples of all ranks. Raises ReceiptError."""
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
        raise ReceiptError(f"the receipt in {folder} holds no step of all processes")
    return History(whole, len(whole) - 1)


def _find_nearest(starts: list[Start], moment: int) -> Start:
    return min(starts, key=lambda start: abs(start.time - moment))


def _read_rank(folder: str, rank: int) -> list[Start]:
    """Return the starts of one rank, with its own samples. Raises ReceiptError."""
    path = os.path.join(folder, LOOP_FILE.format(rank))
    try:
        with open(path, "rb") as file:
            records, is_cut = parse_records(file.read())
        hashes = np.fromfile(os.path.join(folder, SAMPLES_FILE.format(rank)), "<u8")
    except OSError as error:
        raise ReceiptError(f"no receipt of a loop at {error.filename or path}: {error.strerror}") from error
    starts: list[Start] = []
    end = 0  # of the samples that were read so far, in the file of hashes
    # a record of step 0 begins a start of the program
    before, *parts = np.split(records, np.flatnonzero(records["step"] == 0))
    for record in before:
        raise ReceiptError(f"{path} is damaged: step {record['step']} does not follow")
    for part in parts:
        head = part[0]  # the record of the start
        steps = part[1:]
        samples = []
        sizes: list[tuple[int, ...]] = []
        for number, record in enumerate(steps, 1):
            begin = end
            end += int(record["sums"][1])
            if record["step"] != number or end > len(hashes):
                raise ReceiptError(f"{path} is damaged: step {record['step']} does not follow")
            samples.append(hashes[begin:end])
            sizes.append((end - begin,))
        world_size, seed, time = head["sums"].tolist()
        starts.append(
            Start(
                first=_subtract_1(int(head["epoch"])),
                world_size=world_size,
                seed=_subtract_1(seed),
                time=time,
                steps=Steps(steps, samples, sizes),
            )
        )
    if not starts or is_cut:
        raise ReceiptError(f"{path} is cut: it ends within a record, or holds no start")
    return starts


def _subtract_1(number: int) -> int | None:
    """Return the value of a field in the record of a start, where 0 stands for an unknown one."""
    return number - 1 if number else None


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
    sizes = []
    for place, key in enumerate(keys):
        sums_of_ranks, samples_of_ranks = zip(*parts[key], strict=True)
        records["epoch"][place] = key[0]
        records["sums"][place] = np.sum(sums_of_ranks, axis=0)  # modulo 2^64
        hashes.append(np.concatenate(samples_of_ranks))
        sizes.append(tuple(map(len, samples_of_ranks)))
    return Steps(records, hashes, sizes)
