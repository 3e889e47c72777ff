"""Compare the steps of two runs, and follow a run over its restarts."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from bootfile.receipt.records import FILE, LOOP_PARTS, PARTS, History, ReceiptError, Steps


class Difference(NamedTuple):
    """The first difference of two runs.

    steps: number of steps that both runs recorded.
    epoch, step: of the first step that differs (0: none).
    parts: the entries of PARTS or LOOP_PARTS that differ in that step, or "epoch".
    """

    steps: int
    epoch: int
    step: int
    parts: tuple[str, ...]


class Kept(NamedTuple):
    """The steps that a run kept. lines: one for each restart. is_equal: whether each restart had a record of
    the steps before it, and read the same samples where it made steps again."""

    steps: Steps
    lines: list[str]
    is_equal: bool


def find_difference(first: Steps, second: Steps) -> Difference:
    """Find the first step that both have and that differs. Epochs count only in receipts of a Loader: a plain
    loop may count its epochs from 1 after a restart."""
    _, left, right = np.intersect1d(first.numbers, second.numbers, assume_unique=True, return_indices=True)
    ours, theirs = first.records[left], second.records[right]
    is_other = ours["sums"] != theirs["sums"]  # [n, 3]
    is_different = is_other.any(axis=1)
    if not first.samples:
        is_different |= ours["epoch"] != theirs["epoch"]
    if not is_different.any():
        return Difference(len(ours), 0, 0, ())
    place = int(is_different.argmax())
    names = LOOP_PARTS if first.samples else PARTS
    parts = tuple(name for name, differs in zip(names, is_other[place], strict=True) if differs)
    # if the ids differ, labels and crops differ too: report only the ids
    parts = names[:1] if is_other[place, 0] else parts or ("epoch",)
    return Difference(len(ours), int(ours["epoch"][place]), int(ours["step"][place]), parts)


def compare(first: History, second: History) -> tuple[bool, str]:
    """Return (whether two runs read the same samples in the same steps, one line). Raises ReceiptError."""
    if first.seed != second.seed:
        seeds = f"{first.seed} and {second.seed}"
        raise ReceiptError(f"the runs have the seeds {seeds}: their samples differ by design")
    if first.is_of_loop != second.is_of_loop:
        raise ReceiptError(f"only one run has {FILE}")
    ours, theirs = follow(first).steps, follow(second).steps
    difference = find_difference(ours, theirs)
    if difference.step:
        return False, _describe_difference(ours, theirs, difference)
    if not difference.steps:
        return False, "different: the runs have no step in common"
    if difference.steps < max(len(ours), len(theirs)):
        return False, f"equal in the {difference.steps} steps of both; {_describe_end(ours, theirs)}"
    parts = "" if ours.samples else ": the same ids, labels and augmentation"
    return True, f"equal for {difference.steps} steps{parts}"


def describe_size(steps: Steps) -> str:
    """Return the number of steps, of epochs for the receipt of a Loader, and of steps without a record."""
    lost = f", {steps.last - len(steps)} without a record" if steps.last > len(steps) else ""
    if steps.samples:  # a plain loop may have a stream without epochs
        return f"{steps.last} steps{lost}"
    epochs = int(steps.epochs[-1])
    return f"{steps.last} steps, {epochs} epoch{'s' * (epochs != 1)}{lost}"


def follow(history: History) -> Kept:
    """Return the steps that a run kept.

    A start without a first step continues where its first steps were read before, or after the last step.
    """
    steps = history.starts[0].steps
    lines, is_equal = [], True
    for number, start in enumerate(history.starts[1:], 2):
        first = _find_first(steps, start.steps) if start.first is None else start.first
        made = start.steps.renumber(first)
        text = f"start {number} continues at step {first + 1}"
        end = min(steps.last, made.last)  # the last step that was made again
        if steps.last < first:
            text, is_equal = f"{text}: {_name(steps.last + 1, first)} have no record", False
        elif end > first:
            difference = find_difference(steps, made)
            text += f": {_name(first + 1, end)} {'was' if end == first + 1 else 'were'} read twice, "
            text += _describe(steps, made, difference.step) if difference.step else "with the same samples"
            is_equal &= not difference.step
        lines.append(text)
        steps = steps.select(steps.numbers <= first)
        steps = steps.join(_continue_epochs(steps, made))
    return Kept(steps, lines, is_equal)


def _find_first(before: Steps, steps: Steps) -> int:
    """Return the number of the last step after which a run continues as these steps do; its last step if
    there is none."""
    same = np.flatnonzero((before.sums == steps.sums[0]).all(axis=1))
    for place in same[::-1].tolist():
        if _count_equal(before.sums[place:], steps.sums) == min(len(before) - place, len(steps)):
            return int(before.numbers[place]) - 1
    return before.last


def _count_equal(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of steps before the first difference. first, second: uint64 [n, 3], sums of steps."""
    count = min(len(first), len(second))
    is_other = (first[:count] != second[:count]).any(axis=1)
    return int(is_other.argmax()) if is_other.any() else count


def _continue_epochs(before: Steps, steps: Steps) -> Steps:
    """Return the steps of a start, which may count its epochs from 1, with epochs that follow the others."""
    last = int(before.epochs[-1]) if len(before) else 0
    first = int(steps.epochs[0])
    if first > last:
        return steps
    known, new = Counter(before.epochs.tolist()), Counter(steps.epochs.tolist())
    is_same = known[last] + new[first] <= max([*known.values(), *new.values()])
    return steps.shift_epochs(last - first + (not is_same))


def _describe_difference(ours: Steps, theirs: Steps, difference: Difference) -> str:
    if not ours.samples:
        place = f"epoch {difference.epoch}, step {difference.step}"
        return f"different from {place} on: {', '.join(difference.parts)}"
    text = _describe(ours, theirs, difference.step)
    if (difference.step, text) == (1, _OTHER):
        raise ReceiptError("the runs have no sample in common: other data, or ids are needed")
    return f"different from step {difference.step} on: {text}"


def _describe_end(ours: Steps, theirs: Steps) -> str:
    """Return why two runs have not all steps in common, in words."""
    short = min(ours, theirs, key=lambda steps: steps.last)
    if ours.last == theirs.last:
        return "one run has no record of the others"
    if ours.samples:
        return "one run ends there"
    return f"one ends at epoch {short.epochs[-1]}, step {short.last}"


_OTHER = "other samples"


def _describe(theirs: Steps, ours: Steps, step: int) -> str:
    """Return how the samples of our steps differ from theirs. step: the first one that differs."""
    [here], [there] = (np.flatnonzero(steps.numbers == step).tolist() for steps in (ours, theirs))
    sums, expected = ours.sums[here], theirs.sums[there]
    if expected[1] != sums[1]:
        return f"{expected[1]} and {sums[1]} samples: compare runs with the same global batch"
    if expected[0] == sums[0]:
        return "the same samples with other contents (augmentation, random numbers)"
    same = np.flatnonzero((theirs.sums == sums).all(axis=1)).tolist()
    lengths = [(_count_equal(theirs.sums[place:], ours.sums[here:]), place) for place in same]
    length, place = max(lengths, default=(0, 0))
    if length >= min(3, len(ours) - here):  # the same steps at another place
        other = int(theirs.numbers[place])
        if other > step:
            return f"the samples of {_name(step, other - 1)} were skipped"
        return f"the samples of {_name(other, other + length - 1)} were read again"
    return _describe_epoch(theirs, ours, step, int(theirs.epochs[there]))


def _describe_epoch(theirs: Steps, ours: Steps, step: int, epoch: int) -> str:
    """Return how our samples differ from theirs in the rest of an epoch, from a step on."""
    is_in_epoch = theirs.epochs == epoch
    rest = theirs.select(is_in_epoch & (theirs.numbers >= step) & np.isin(theirs.numbers, ours.numbers))
    before = _join_samples(theirs.select(is_in_epoch & (theirs.numbers < step)))
    wanted = _join_samples(rest)
    read = _join_samples(ours.select(np.isin(ours.numbers, rest.numbers)))
    if np.array_equal(np.sort(wanted), np.sort(read)):
        return f"the samples of {_name(step, rest.last)} were reordered"
    if not np.isin(read, [*before, *wanted]).any():
        return _OTHER
    twice, skipped = np.isin(read, before).sum(), np.isin(wanted, read, invert=True).sum()
    return f"{twice} samples of the epoch were read twice, {skipped} were skipped up to step {rest.last}"


def _join_samples(steps: Steps) -> np.ndarray:
    """Return the hashes of the samples of some steps, uint64 [n]."""
    return np.concatenate([np.zeros(0, np.uint64), *steps.samples])


def _name(first: int, last: int) -> str:
    """Return the steps first..last in words."""
    return f"step {last}" if last == first else f"steps {first}-{last}"
