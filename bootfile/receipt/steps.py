"""The steps of a run as a receipt has them; compare those of two runs, and follow a run over its restarts."""

import dataclasses
import itertools
import operator
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from bootfile.ground.errors import BadInput
from bootfile.ground.numbers import counted, find_ranges
from bootfile.receipt.records import FILE, LOOP_PARTS, PARTS


@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """Steps of a run, in the order of their numbers.

    records: RECORD [n]. samples: the hashes of the samples of each step, uint64, rank after rank; empty for
    the receipt of a Loader, which has only sums. sizes: of each step, the number of samples of each rank.
    """

    records: np.ndarray
    samples: list[np.ndarray] = dataclasses.field(default_factory=list)
    sizes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def numbers(self) -> np.ndarray:
        """Return the numbers of the steps, int64 [n]."""
        return self.records["step"].astype(np.int64)

    @property
    def epochs(self) -> np.ndarray:
        """Return the epoch of each step, int64 [n]."""
        return self.records["epoch"].astype(np.int64)

    @property
    def sums(self) -> np.ndarray:
        """Return the sums of each step, uint64 [n, 3]."""
        sums: np.ndarray = self.records["sums"]
        return sums

    @property
    def last(self) -> int:
        """Return the number of the last step, 0 without steps."""
        return int(self.records["step"][-1]) if len(self) else 0

    def select(self, is_chosen: np.ndarray) -> "Steps":
        """Return some of the steps. is_chosen: bool [n]."""
        samples = list(itertools.compress(self.samples, is_chosen))
        return Steps(self.records[is_chosen], samples, list(itertools.compress(self.sizes, is_chosen)))

    def change(self, name: str, values: np.ndarray) -> "Steps":
        """Return the steps with other values in a field of their records, "step" or "epoch"."""
        records = self.records.copy()
        records[name] = values
        return dataclasses.replace(self, records=records)

    def renumber(self, first: int) -> "Steps":
        """Return the steps with the numbers first + 1, first + 2, ..."""
        return self.change("step", np.arange(first + 1, first + 1 + len(self)))

    def join(self, following: "Steps") -> "Steps":
        """Return these steps and those that follow them."""
        records = np.concatenate([self.records, following.records])
        return Steps(records, self.samples + following.samples, self.sizes + following.sizes)


class Start(NamedTuple):
    """One start of a program, with the steps that it made."""

    first: int | None  # number of steps that were completed before it; None: unknown
    world_size: int
    seed: int | None  # of the data; None without one
    time: int  # in ns
    steps: Steps  # numbered from 1 if `first` is unknown


class History(NamedTuple):
    """What a receipt has of a run."""

    starts: list[Start]  # of a plain loop; a Loader's receipt has a single one, with all steps
    restarts: int  # the number of restarts
    begin: int = 0  # the step before the first one that a Loader's receipt has to have
    origin: str = ""  # where the run begins, in words, if that is at a step of another run
    # the steps whose batches lack samples, see recorded_run.Run.sum_removed()
    removed: Mapping[int, tuple[int, int]] = MappingProxyType({})

    @property
    def is_of_loop(self) -> bool:
        """Return whether it is the receipt of a plain loop, which has the samples of the steps."""
        return bool(self.starts[0].steps.samples)

    @property
    def seed(self) -> int | None:
        """Return the seed of the data; None if the receipt has none, as that of a Loader."""
        return self.starts[0].seed


class Difference(NamedTuple):
    """The first difference of two runs."""

    steps: int  # number of steps that both runs recorded
    epoch: int = 0  # of the first step that differs; 0: none does
    step: int = 0  # the first step that differs; 0: none does
    parts: tuple[str, ...] = ()  # the entries of PARTS or LOOP_PARTS that differ in that step, or "epoch"


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
        return Difference(len(first_records))
    place = int(is_different.argmax())
    record = first_records[place]
    parts = tuple(itertools.compress(LOOP_PARTS if first.samples else PARTS, is_other[place])) or ("epoch",)
    if is_other[place, 0]:  # if the ids differ, labels and crops differ too: report only the ids
        parts = parts[:1]
    return Difference(len(first_records), int(record["epoch"]), int(record["step"]), parts)


def compare(first: History, second: History) -> tuple[bool, str]:
    """Return (whether two runs read the same samples in the same steps, one line). Raises BadInput."""
    if first.seed != second.seed:
        seeds = f"{first.seed} and {second.seed}"
        raise BadInput(f"the runs have the seeds {seeds}: their samples differ by design")
    if first.is_of_loop != second.is_of_loop:
        raise BadInput(f"only one run has {FILE}")
    begin = max(first.begin, second.begin)  # of a run that begins at a step of another one
    # the steps that each run kept over its restarts
    kept = [follow(history).steps for history in (first, second)]
    runs = [steps.select(steps.numbers > begin) for steps in kept]
    # --without: these steps differ on purpose, so they are compared with the removed samples added again
    removed = sorted({step for step, _ in first.removed.items() ^ second.removed.items() if step > begin})
    whole = [_sum_whole(history, steps) for history, steps in zip((first, second), runs, strict=True)]
    for step in removed:
        if whole[0].get(step) != whole[1].get(step) and whole[0].keys() & whole[1].keys() & {step}:
            return False, f"different: step {step} had other samples, also without those that were removed"
    # --skip_steps in one run only: the other steps are still compared
    left_out = sorted(({*find_left_out(runs[0])} ^ {*find_left_out(runs[1])}) - {*removed})
    skipped = [*removed, *left_out]
    first_steps, second_steps = (steps.select(~np.isin(steps.numbers, skipped)) for steps in runs)
    difference = find_difference(first_steps, second_steps)
    if difference.step:
        return False, _describe_difference(first_steps, second_steps, difference)
    changes = []
    if removed:
        changes.append(f"{name_ranges(removed)} without some samples in one run, the other ids are equal")
    if left_out:
        changes.append(f"{name_ranges(left_out)} left out in one run")
    if changes:
        return False, f"different: {', '.join(changes)}, the other steps are equal"
    if not difference.steps:
        return False, "different: the runs have no step in common"
    if difference.steps < max(len(first_steps), len(second_steps)):
        end = _describe_end(first_steps, second_steps)
        return False, f"equal in the {difference.steps} steps of both; {end}"
    since = f", from step {begin + 1} on" if begin else ""
    parts = "" if first_steps.samples else ": the same ids, labels and augmentation"
    return True, f"equal for {difference.steps} steps{since}{parts}"


def _sum_whole(history: History, steps: Steps) -> dict[int, int]:
    """Return step -> the sum of the hashes of its batch, modulo 2^64, with those of the removed samples."""
    rows = zip(steps.numbers.tolist(), steps.sums[:, 0].tolist(), strict=True)
    return {step: (total + history.removed.get(step, (0, 0))[1]) % 2**64 for step, total in rows}


def find_left_out(steps: Steps) -> list[int]:
    """Return the steps of a Loader's receipt that --skip_steps has left out: their sums are 0."""
    return [] if steps.samples else [*steps.numbers[~steps.sums.any(axis=1)].tolist()]


def name_ranges(numbers: list[int]) -> str:
    """Return ascending numbers of steps in words: "step 7 was", "steps 3-5, 9 were"; of more than 20 ranges
    their number: "412 steps, the first is 3, were"."""
    ranges = find_ranges(numbers)
    if len(ranges) > 20:
        return f"{len(numbers)} steps, the first is {numbers[0]}, were"
    return f"step {ranges[0]} was" if len(numbers) == 1 else f"steps {', '.join(ranges)} were"


def describe_size(steps: Steps, begin: int = 0) -> str:
    """Return the number of steps, of epochs for the receipt of a Loader, and of steps without a record.
    begin: the step before the first one that the receipt has to have."""
    # a plain loop may have a stream without epochs
    epochs = "" if steps.samples else f", {counted(int(steps.epochs[-1]), 'epoch')}"
    missing = steps.last - begin - len(steps)  # a kill was faster than the write of these records
    lost = f", {missing} without a record" if missing > 0 else ""
    return f"{steps.last} steps{epochs}{lost}"


def follow(history: History) -> Kept:
    """Return the steps that a run kept.

    A start without a first step continues where its first steps were read before, or after the last step.
    """
    steps = history.starts[0].steps  # those that the run kept so far
    lines = []
    is_equal = True
    for number, start in enumerate(history.starts[1:], 2):
        first = _find_first(steps, start.steps) if start.first is None else start.first
        made = start.steps.renumber(first)
        text = ""
        last_again = min(steps.last, made.last)  # the last step that was made again
        if steps.last < first:
            text = f": {_name(steps.last + 1, first)} have no record"
            is_equal = False
        elif last_again > first:
            other = find_difference(steps, made).step
            is_equal &= not other
            result = _describe(steps, made, other) if other else "with the same samples"
            text = f": {name_ranges([*range(first + 1, last_again + 1)])} read twice, {result}"
        lines.append(f"start {number} continues at step {first + 1}{text}")
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
    last = int(before.epochs.max(initial=0))  # 0: the start before was killed before its first step
    first = int(steps.epochs[0])
    if first > last:
        return steps
    counts_before = Counter(before.epochs.tolist())  # epoch -> the number of its steps
    counts = Counter(steps.epochs.tolist())
    longest = max([*counts_before.values(), *counts.values()])
    # it continues the last epoch if both parts together are not longer than an epoch, else it begins the next
    begins_next = counts_before[last] + counts[first] > longest
    return steps.change("epoch", steps.epochs + last - first + begins_next)


def _describe_difference(first: Steps, second: Steps, difference: Difference) -> str:
    """Return the first difference of two runs in words. Raises BadInput if they have other data."""
    if not first.samples:
        place = f"epoch {difference.epoch}, step {difference.step}"
        return f"different from {place} on: {', '.join(difference.parts)}"
    text = _describe(first, second, difference.step)
    # not one sample of the first epoch in common: these are not two runs on the same data
    if difference.step == 1 and text == _OTHER:
        raise BadInput("the runs have no sample in common: other data, or ids are needed")
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
    places = np.flatnonzero((expected.sums == sums).all(axis=1)).tolist()
    rows = [(_count_equal(expected.sums[same:], read.sums[place:]), same) for same in places]
    length, start = max(rows, default=(0, 0))
    other = int(expected.numbers[start])
    if length >= min(3, len(read) - place):
        if other > step:
            return f"the samples of {_name(step, other - 1)} were skipped"
        return f"the samples of {_name(other, other + length - 1)} were read again"
    # three sets of samples of the epoch: before the step, from it on as expected, and as they were read
    is_in_epoch = expected.epochs == expected.epochs[expected_place]
    is_later = is_in_epoch & (expected.numbers >= step)
    rest = expected.select(is_later & np.isin(expected.numbers, read.numbers))
    before = _join_samples(expected.select(is_in_epoch & ~is_later))
    wanted = _join_samples(rest)
    samples = _join_samples(read.select(np.isin(read.numbers, rest.numbers)))
    if np.array_equal(np.sort(wanted), np.sort(samples)):
        return f"the samples of {_name(step, rest.last)} were reordered"
    twice = np.isin(samples, before).sum()
    skipped = np.isin(wanted, samples, invert=True).sum()
    if not np.isin(samples, [*before, *wanted]).any() or not (twice or skipped):
        return _OTHER
    return f"{twice} samples of the epoch were read twice and {skipped} skipped up to step {rest.last}"


def _join_samples(steps: Steps) -> np.ndarray:
    """Return the hashes of the samples of some steps, uint64 [n]."""
    return np.concatenate([np.zeros(0, np.uint64), *steps.samples])


def _name(first: int, last: int) -> str:
    """Return the steps first..last in words."""
    return f"step {last}" if last == first else f"steps {first}-{last}"
