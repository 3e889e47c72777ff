"""Compare the steps of two runs, and follow a run over its restarts."""

import itertools
import operator
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
    # by their numbers: a run may lack records of some steps
    _, first_places, second_places = np.intersect1d(
        first.numbers, second.numbers, assume_unique=True, return_indices=True
    )
    first_records = first.records[first_places]
    second_records = second.records[second_places]
    is_other = first_records["sums"] != second_records["sums"]  # bool [n, 3]
    is_different = is_other.any(axis=1)
    if not first.samples:
        is_different |= first_records["epoch"] != second_records["epoch"]
    if not is_different.any():
        return Difference(len(first_records), 0, 0, ())
    place = int(is_different.argmax())
    record = first_records[place]
    names: tuple[str, ...] = LOOP_PARTS if first.samples else PARTS
    if is_other[place, 0]:  # if the ids differ, labels and crops differ too: report only the ids
        parts = names[:1]
    elif is_other[place].any():
        parts = tuple(itertools.compress(names, is_other[place]))
    else:
        parts = ("epoch",)
    return Difference(len(first_records), int(record["epoch"]), int(record["step"]), parts)


def compare(first: History, second: History) -> tuple[bool, str]:
    """Return (whether two runs read the same samples in the same steps, one line). Raises ReceiptError."""
    if first.seed != second.seed:
        seeds = f"{first.seed} and {second.seed}"
        raise ReceiptError(f"the runs have the seeds {seeds}: their samples differ by design")
    if first.is_of_loop != second.is_of_loop:
        raise ReceiptError(f"only one run has {FILE}")
    # first each run alone: the steps that it kept over its restarts
    first_steps = follow(first).steps
    second_steps = follow(second).steps
    begin = max(first.begin, second.begin)
    if begin:  # a run begins at a step of another one
        first_steps = first_steps.select(first_steps.numbers > begin)
        second_steps = second_steps.select(second_steps.numbers > begin)
    # --without: these steps differ on purpose, so they are compared with the removed samples added again
    removed_steps = _find_removed(first, second, begin)
    step = _find_other_rest(first, second, removed_steps)
    if step:
        return False, f"different: step {step} had other samples, also without those that were removed"
    first_steps = first_steps.select(~np.isin(first_steps.numbers, removed_steps))
    second_steps = second_steps.select(~np.isin(second_steps.numbers, removed_steps))
    # --skip_steps in one run only: the other steps are still compared
    of_one_run = set(find_left_out(first_steps)) ^ set(find_left_out(second_steps))
    if of_one_run:
        places = [*of_one_run]
        first_steps = first_steps.select(~np.isin(first_steps.numbers, places))
        second_steps = second_steps.select(~np.isin(second_steps.numbers, places))
    difference = find_difference(first_steps, second_steps)
    if difference.step:
        return False, _describe_difference(first_steps, second_steps, difference)
    if removed_steps or of_one_run:
        return False, _describe_changes(removed_steps, sorted(of_one_run))
    if not difference.steps:
        return False, "different: the runs have no step in common"
    if difference.steps < max(len(first_steps), len(second_steps)):
        end = _describe_end(first_steps, second_steps)
        return False, f"equal in the {difference.steps} steps of both; {end}"
    text = f"equal for {difference.steps} steps"
    if begin:
        text += f", from step {begin + 1} on"
    if not first_steps.samples:
        text += ": the same ids, labels and augmentation"
    return True, text


def _find_removed(first: History, second: History, begin: int) -> list[int]:
    """Return the steps after `begin` that lack samples in one run which the other one has, ascending."""
    steps = []
    for step in sorted({*first.removed, *second.removed}):
        if step > begin and first.removed.get(step) != second.removed.get(step):
            steps.append(step)
    return steps


def _describe_changes(removed_steps: list[int], left_out: list[int]) -> str:
    """Return in words what two runs have not in common on purpose. left_out: steps."""
    parts = []
    if removed_steps:
        parts.append(f"{name_few(removed_steps)} without some samples in one run, the other ids are equal")
    if left_out:
        parts.append(f"{name_ranges(left_out)} left out in one run")
    return f"different: {', '.join(parts)}, the other steps are equal"


def _find_other_rest(first: History, second: History, steps: list[int]) -> int:
    """Return the first of these steps, from which samples were removed, that has other ids in the two runs
    when the removed ones are counted, too; 0 without one."""
    sums = []
    for history in (first, second):
        known = follow(history).steps
        ids = dict(zip(known.numbers.tolist(), known.sums[:, 0].tolist(), strict=True))
        # the sums are modulo 2^64: with the removed hashes added it is the sum of the whole batch
        for step, (_, removed) in history.removed.items():
            if step in ids:
                ids[step] = (ids[step] + removed) % 2**64
        sums.append(ids)
    for step in steps:
        if step in sums[0] and step in sums[1] and sums[0][step] != sums[1][step]:
            return step
    return 0


def find_left_out(steps: Steps) -> list[int]:
    """Return the numbers of the steps of a Loader's receipt that --skip_steps has left out: their sums are
    0."""
    # a plain loop leaves out no steps
    if steps.samples:
        return []
    numbers: list[int] = steps.numbers[~steps.sums.any(axis=1)].tolist()
    return numbers


def name_ranges(numbers: list[int]) -> str:
    """Return ascending numbers of steps in words: "step 7 was", "steps 3-5, 9 were"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = []
    for first, last in ranges:
        text = f"{first}-{last}" if last > first else str(first)
        texts.append(text)
    if len(numbers) == 1:
        return f"step {numbers[0]} was"
    return f"steps {', '.join(texts)} were"


def name_few(numbers: list[int]) -> str:
    """Return name_ranges(), or for many steps their number: "412 steps, the first is 3, were"."""
    if len(numbers) > 20:
        return f"{len(numbers)} steps, the first is {numbers[0]}, were"
    return name_ranges(numbers)


def describe_size(steps: Steps, begin: int = 0) -> str:
    """Return the number of steps, of epochs for the receipt of a Loader, and of steps without a record.
    begin: the step before the first one that the receipt has to have."""
    lost = ""
    if steps.last - begin > len(steps):  # a kill was faster than the write of these records
        lost = f", {steps.last - begin - len(steps)} without a record"
    if steps.samples:  # a plain loop may have a stream without epochs
        return f"{steps.last} steps{lost}"
    epochs = int(steps.epochs[-1])
    plural = "" if epochs == 1 else "s"
    return f"{steps.last} steps, {epochs} epoch{plural}{lost}"


def follow(history: History) -> Kept:
    """Return the steps that a run kept.

    A start without a first step continues where its first steps were read before, or after the last step.
    """
    steps = history.starts[0].steps  # those that the run kept so far
    lines = []
    is_equal = True
    for number, start in enumerate(history.starts[1:], 2):
        first = start.first
        if first is None:
            first = _find_first(steps, start.steps)
        made = start.steps.renumber(first)
        text = f"start {number} continues at step {first + 1}"
        last_again = min(steps.last, made.last)  # the last step that was made again
        if steps.last < first:
            text += f": {_name(steps.last + 1, first)} have no record"
            is_equal = False
        elif last_again > first:
            verb = "was" if last_again == first + 1 else "were"
            text += f": {_name(first + 1, last_again)} {verb} read twice, "
            difference = find_difference(steps, made)
            if difference.step:
                text += _describe(steps, made, difference.step)
                is_equal = False
            else:
                text += "with the same samples"
        lines.append(text)
        # steps that were made again replace those of the start before
        steps = steps.select(steps.numbers <= first)
        steps = steps.join(_continue_epochs(steps, made))
    return Kept(steps, lines, is_equal)


def _find_first(before: Steps, steps: Steps) -> int:
    """Return the number of the last step after which a run continues as these steps do; its last step if
    there is none."""
    same_as_first = np.flatnonzero((before.sums == steps.sums[0]).all(axis=1))
    # backwards: of several places the latest one counts, near which a run continues
    for place in same_as_first[::-1].tolist():
        common = min(len(before) - place, len(steps))
        if _count_equal(before.sums[place:], steps.sums) == common:
            return int(before.numbers[place]) - 1
    return before.last


def _count_equal(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of steps before the first difference. first, second: uint64 [n, 3], sums of steps."""
    count = min(len(first), len(second))
    is_other = (first[:count] != second[:count]).any(axis=1)
    return int(is_other.argmax()) if is_other.any() else count


def _continue_epochs(before: Steps, steps: Steps) -> Steps:
    """Return the steps of a start, which may count its epochs from 1, with epochs that follow the others."""
    last = 0
    if len(before):  # else the start before was killed before its first step
        last = int(before.epochs[-1])
    first = int(steps.epochs[0])
    if first > last:
        return steps
    counts_before = Counter(before.epochs.tolist())  # epoch -> the number of its steps
    counts = Counter(steps.epochs.tolist())
    longest = max([*counts_before.values(), *counts.values()])
    # it continues the last epoch if both parts together are not longer than an epoch, else it begins the next
    if counts_before[last] + counts[first] <= longest:
        return steps.shift_epochs(last - first)
    return steps.shift_epochs(last - first + 1)


def _describe_difference(first: Steps, second: Steps, difference: Difference) -> str:
    """Return the first difference of two runs in words. Raises ReceiptError if they have other data."""
    if not first.samples:
        place = f"epoch {difference.epoch}, step {difference.step}"
        return f"different from {place} on: {', '.join(difference.parts)}"
    text = _describe(first, second, difference.step)
    # not one sample of the first epoch in common: these are not two runs on the same data
    if difference.step == 1 and text == _OTHER:
        raise ReceiptError("the runs have no sample in common: other data, or ids are needed")
    return f"different from step {difference.step} on: {text}"


def _describe_end(first: Steps, second: Steps) -> str:
    """Return why two runs have not all steps in common, in words."""
    if first.last == second.last:
        return "one run has no record of the others"
    if first.samples:
        return "one run ends there"
    short = min(first, second, key=operator.attrgetter("last"))
    return f"one ends at epoch {short.epochs[-1]}, step {short.last}"


_OTHER = "other samples"


def _describe(expected: Steps, read: Steps, step: int) -> str:
    """Return how the samples that were read differ from the expected ones. step: the first one that differs.

    expected: the steps of the first run; or, for a restart, those of the starts before it.
    """
    [expected_place] = np.flatnonzero(expected.numbers == step).tolist()
    [place] = np.flatnonzero(read.numbers == step).tolist()
    expected_sums = expected.sums[expected_place]  # of LOOP_PARTS: samples, their number, contents
    sums = read.sums[place]
    if expected_sums[1] != sums[1]:
        return f"{expected_sums[1]} and {sums[1]} samples: compare runs with the same global batch"
    if expected_sums[0] == sums[0]:
        return "the same samples with other contents (augmentation, random numbers)"
    # the longest row of expected steps that were read from this step on, at another place
    length = 0
    start = 0
    for same_place in np.flatnonzero((expected.sums == sums).all(axis=1)).tolist():
        count = _count_equal(expected.sums[same_place:], read.sums[place:])
        if count >= length:
            length = count
            start = same_place
    if length >= min(3, len(read) - place):
        other = int(expected.numbers[start])
        if other > step:
            return f"the samples of {_name(step, other - 1)} were skipped"
        return f"the samples of {_name(other, other + length - 1)} were read again"
    return _describe_epoch(expected, read, step, int(expected.epochs[expected_place]))


def _describe_epoch(expected: Steps, read: Steps, step: int, epoch: int) -> str:
    """Return how the samples that were read differ from the expected ones, from a step to the end of the
    epoch."""
    # three sets of samples: before the step, from it on as expected, and from it on as they were read
    is_in_epoch = expected.epochs == epoch
    is_rest = is_in_epoch & (expected.numbers >= step) & np.isin(expected.numbers, read.numbers)
    rest = expected.select(is_rest)
    before = _join_samples(expected.select(is_in_epoch & (expected.numbers < step)))
    wanted = _join_samples(rest)
    samples = _join_samples(read.select(np.isin(read.numbers, rest.numbers)))
    if np.array_equal(np.sort(wanted), np.sort(samples)):
        return f"the samples of {_name(step, rest.last)} were reordered"
    if not np.isin(samples, [*before, *wanted]).any():
        return _OTHER
    twice = np.isin(samples, before).sum()
    skipped = np.isin(wanted, samples, invert=True).sum()
    if not twice and not skipped:
        return _OTHER
    if not twice:
        return f"{skipped} samples of the epoch were skipped up to step {rest.last}"
    text = f"{twice} samples of the epoch were read twice"
    if skipped:
        text += f", {skipped} were skipped"
    return f"{text} up to step {rest.last}"


def _join_samples(steps: Steps) -> np.ndarray:
    """Return the hashes of the samples of some steps, uint64 [n]."""
    return np.concatenate([np.zeros(0, np.uint64), *steps.samples])


def _name(first: int, last: int) -> str:
    """Return the steps first..last in words."""
    return f"step {last}" if last == first else f"steps {first}-{last}"
