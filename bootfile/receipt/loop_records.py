"""Read and compare what loop_receipt.py has recorded, without torch."""

import os
from collections import Counter
from typing import NamedTuple

import numpy as np

from bootfile.receipt.one_run import find_unusual
from bootfile.receipt.records import ReceiptError, parse_records

# A record of step 0 is a start. Sums: world size, seed + 1 or 0, time in ns. Epoch: first step + 1 or 0.
FILE, SAMPLES = "receipt-{}.bin", "samples-{}.bin"


class Step(NamedTuple):
    """One step. sums: of ids (or contents), number of samples, of contents. samples: hashes, uint64 [n], rank
    after rank. sizes: the samples of each rank."""

    epoch: int
    sums: tuple[int, ...]
    samples: np.ndarray
    sizes: tuple[int, ...] = ()


class Start(NamedTuple):
    """One start of a program. first: number of steps that were completed before it; None if unknown."""

    first: int | None
    world_size: int
    seed: int | None
    time: int
    steps: list[Step]


def read(folder: str) -> list[Start]:
    """Return the starts that have steps, each with the samples of all ranks. Raises ReceiptError."""
    starts = _read_rank(folder, 0)
    others = [_read_rank(folder, rank) for rank in range(1, max(each.world_size for each in starts))]
    whole = []
    for start in starts:  # the start of another rank is the nearest one in time, unless it has none
        same = [_nearest(rank, start.time) for rank in others[: start.world_size - 1]]
        steps = _merge([each.steps for each in (start, *same)])
        if steps and all(_nearest(starts, each.time) is start for each in same):
            whole.append(start._replace(steps=steps))
    if not whole:
        raise ReceiptError(f"the receipt in {folder} holds no step of all processes")
    return whole


def _nearest(starts: list[Start], moment: int) -> Start:
    return min(starts, key=lambda start: abs(start.time - moment))


def _read_rank(folder: str, rank: int) -> list[Start]:
    path = os.path.join(folder, FILE.format(rank))
    try:
        with open(path, "rb") as file:
            records, is_cut = parse_records(file.read())
        hashes = np.fromfile(os.path.join(folder, SAMPLES.format(rank)), "<u8")
    except OSError as error:
        raise ReceiptError(f"no receipt of a loop at {path}: {error.strerror}") from error
    starts, last = list[Start](), 0
    for record in records:
        epoch, sums = int(record["epoch"]), tuple(map(int, record["sums"]))
        if record["step"]:
            last += sums[1]
            if not starts or int(record["step"]) != len(starts[-1].steps) + 1 or last > len(hashes):
                raise ReceiptError(f"{path} is damaged: step {record['step']} does not follow")
            starts[-1].steps.append(Step(epoch, sums, hashes[last - sums[1] : last]))
        else:
            starts.append(Start(epoch - 1 if epoch else None, sums[0], (sums[1] or None), sums[2], []))
    if not starts or is_cut:
        raise ReceiptError(f"{path} is cut: it ends within a record, or holds no start")
    return starts


def _merge(ranks: list[list[Step]]) -> list[Step]:
    """Return the steps that all ranks have reached, each with the samples of all ranks."""
    parts: dict[tuple[int, int], list[Step]] = {}  # (epoch, number in the epoch) -> steps
    ends = []
    for steps in ranks:
        seen, key = Counter[int](), (0, 0)
        for step in steps:
            seen[step.epoch] += 1
            key = step.epoch, seen[step.epoch]
            parts.setdefault(key, []).append(step)
        ends.append(key)
    return [
        Step(
            key[0],
            tuple(sum(column) % 2**64 for column in zip(*(step.sums for step in parts[key]), strict=True)),
            np.concatenate([step.samples for step in parts[key]]),
            tuple(len(step.samples) for step in parts[key]),
        )
        for key in sorted(parts)
        if key <= min(ends)
    ]


def follow(starts: list[Start]) -> tuple[list[Step], list[str], bool]:
    """Return the steps that a run kept, a line for each restart, and whether its restarts read equal samples.

    A start without a first step continues where its first steps were read before, or after the last step.
    """
    steps = [_MISSING] * (starts[0].first or 0) + starts[0].steps
    lines, equal = [], True
    for number, start in enumerate(starts[1:], 2):
        first = _find_first(steps, start) if start.first is None else start.first
        text = f"start {number} continues at step {first + 1}"
        again = min(len(steps) - first, len(start.steps))
        if again < 0:
            text, equal = f"{text}: {_name(len(steps), first)} have no record", False
        elif again:
            text += f": {_name(first, first + again)} {'was' if again == 1 else 'were'} read twice, "
            place = _count_equal(steps[first:], start.steps)
            text += "with the same samples" if place == again else describe(steps, first, start.steps, place)
            equal &= place == again
        lines.append(text)
        steps = steps[:first] + [_MISSING] * -again
        steps += _renumber(steps, start.steps)
    return steps, lines, equal


def _renumber(before: list[Step], steps: list[Step]) -> list[Step]:
    """Return the steps of a start, which may count its epochs from 1, with numbers that follow the others."""
    last, own = before[-1].epoch if before else 0, steps[0].epoch
    if own > last:
        return steps
    counts, new = (Counter(step.epoch for step in each) for each in (before, steps))
    is_same = counts[last] + new[own] <= max(*counts.values(), *new.values())
    shift = last - own + (not is_same)
    return [step._replace(epoch=step.epoch + shift) for step in steps]


_MISSING = Step(0, (0, 0, 0), np.zeros(0, np.uint64))


def _find_first(steps: list[Step], start: Start) -> int:
    """Return the last place where the steps continue as the start does; their end if none does."""
    same = [k for k, step in enumerate(steps) if step.sums == start.steps[0].sums]
    ends = ((k, min(len(steps) - k, len(start.steps))) for k in reversed(same))
    return next((k for k, end in ends if _count_equal(steps[k:], start.steps) == end), len(steps))


def _count_equal(first: list[Step], second: list[Step]) -> int:
    """Return the number of steps before the first difference. Epochs are not compared: each start counts its
    own."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((k for k, (a, b) in pairs if a.sums != b.sums), min(len(first), len(second)))


def compare(first: list[Start], second: list[Start]) -> tuple[bool, str]:
    """Return (whether two runs read the same samples in the same steps, one line). Raises ReceiptError."""
    if first[0].seed != second[0].seed:
        seeds = " and ".join(str(run[0].seed and run[0].seed - 1) for run in (first, second))
        raise ReceiptError(f"the runs have the seeds {seeds}: their samples differ by design")
    a, b = follow(first)[0], follow(second)[0]
    place, both = _count_equal(a, b), min(len(a), len(b))
    if place < both:
        difference = describe(a, 0, b, place)
        if (place, difference) == (0, "other samples"):
            raise ReceiptError("the runs have no sample in common: other data, or ids are needed")
        return False, f"different from step {place + 1} on: {difference}"
    if len(a) != len(b):
        return False, f"equal in the {both} steps of both; one run ends there"
    return True, f"equal for {len(a)} steps"


def describe(theirs: list[Step], first: int, ours: list[Step], place: int) -> str:
    """Return how our steps differ from theirs[first:]. place: of the first difference."""
    expected, step = theirs[first + place], ours[place]
    if expected.sums[1] != step.sums[1]:
        return f"{expected.sums[1]} and {step.sums[1]} samples: compare runs with the same global batch"
    if expected.sums[0] == step.sums[0]:
        return "the same samples with other contents (augmentation, random numbers)"
    same = [other for other, each in enumerate(theirs) if each.sums == step.sums]
    length, other = max(((_count_equal(theirs[k:], ours[place:]), k) for k in same), default=(0, 0))
    if length >= min(3, len(ours) - place):  # the same steps at another place
        if other > first + place:
            return f"the samples of {_name(first + place, other)} were skipped"
        return f"the samples of {_name(other, other + length)} were read again"
    epoch = [k for k in range(len(theirs)) if theirs[k].epoch == expected.epoch]  # the same samples, mixed
    rest = [k for k in epoch if first + place <= k < first + len(ours)]
    before = np.concatenate([theirs[k].samples for k in epoch if k < first + place] or [_MISSING.samples])
    wanted = np.concatenate([theirs[k].samples for k in rest])
    got = np.concatenate([ours[k - first].samples for k in rest])
    if np.array_equal(np.sort(wanted), np.sort(got)):
        return f"the samples of {_name(rest[0], rest[-1] + 1)} were reordered"
    if not np.isin(got, [*before, *wanted]).any():
        return "other samples"
    twice, skipped = np.isin(got, before).sum(), np.isin(wanted, got, invert=True).sum()
    return f"{twice} samples of the epoch were read twice, {skipped} were skipped up to step {rest[-1] + 1}"


def _name(first: int, last: int) -> str:
    """Return the steps first..last-1, counted from 0, in words, counted from 1."""
    return f"step {last}" if last - first == 1 else f"steps {first + 1}-{last}"


def report(folders: list[str], **usual: bool) -> tuple[bool, list[str]]:
    """Return (whether one or two runs read what they should, lines about them). usual: the options of
    find_unusual(), for one run. Raises ReceiptError."""
    runs, equal, lines = [read(folder) for folder in folders], True, []
    followed = [follow(run) for run in runs]
    for folder, (steps, restarts, is_equal) in zip(folders, followed, strict=True):
        lines += [f"{folder}: {len(steps)} steps", *restarts]
        equal &= is_equal
    if len(runs) == 2:
        is_equal, text = compare(*runs)
        return equal and is_equal, [*lines, f"data {text}"]
    unusual = find_unusual(followed[0][0], len(runs[0]) - 1, **usual)
    return equal and not unusual, [*lines, *(f"unusual: {line}" for line in unusual)]
