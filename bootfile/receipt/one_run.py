"""Find what is unusual in one run: epochs with the same order, samples that come twice or never, ranks with
the same samples, augmentation that repeats.

Samples are known by 64-bit hashes of their ids or contents. A run that draws with replacement, or keeps one
order on purpose, has to say so: it looks as a defect does.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from bootfile.receipt.records import Steps

_EQUAL_SHARE = 0.1  # the share of samples that may have the content of another one
_SHOWN = 4  # lines about epochs


class Options(NamedTuple):
    """What one run may do without being unusual.

    repeats: samples may come twice in an epoch, or on two ranks.
    same_order: epochs may have the same order.
    augmented: samples may not look the same in two epochs.
    """

    repeats: bool = False
    same_order: bool = False
    augmented: bool = False


class Epoch(NamedTuple):
    """The steps of an epoch that a run kept. is_whole: whether it has all steps of an epoch."""

    number: int
    steps: Steps
    is_whole: bool = False

    @property
    def first(self) -> int:
        """Return the number of the first step."""
        return int(self.steps.numbers[0])

    @property
    def orders(self) -> np.ndarray:
        """Return the sum of the hashes of the samples of each step, uint64 [n]."""
        return self.steps.sums[:, 0]

    @property
    def contents(self) -> np.ndarray:
        """Return the same sums with augmentation, uint64 [n]."""
        return self.steps.sums[:, 2]


def find_unusual(steps: Steps, restarts: int, options: Options) -> list[str]:
    """Return lines about what is unusual in the steps that a run kept. restarts: their number.

    Samples that come twice are not seen if the receipt has only sums.
    """
    numbers = np.unique(steps.epochs).tolist()
    epochs = mark_whole([Epoch(number, steps.select(steps.epochs == number)) for number in numbers], restarts)
    has_ids = not steps.samples or any((epoch.orders != epoch.contents).any() for epoch in epochs)
    lines = [] if options.same_order else find_same_orders(epochs)
    if steps.samples and not options.repeats:
        lines += find_repeats(epochs, has_ids)
        lines += find_same_ranks(steps)
    return lines + (find_same_contents(epochs, has_ids) if options.augmented else [])


def mark_whole(epochs: list[Epoch], restarts: int) -> list[Epoch]:
    """Return the epochs. Whole are those with the most steps, if at least two have as many; without restarts
    also all before the last one."""
    counts = Counter(len(epoch.steps) for epoch in epochs)
    most = max(counts, default=0)
    ended = epochs[:-1] if not restarts else []
    same = [epoch for epoch in epochs if counts[most] > 1 and len(epoch.steps) == most]
    numbers = {epoch.number for epoch in (*ended, *same)}
    return [epoch._replace(is_whole=epoch.number in numbers) for epoch in epochs]


def find_same_orders(epochs: list[Epoch]) -> list[str]:
    """Return a line for epochs whose steps have the same samples in the same order, at least two steps."""
    groups: dict[tuple[int, ...], list[Epoch]] = {}
    lines = []
    for epoch in epochs:
        if len(epoch.orders) > 1:
            groups.setdefault(tuple(epoch.orders[:2].tolist()), []).append(epoch)
    for first, *others in groups.values():
        pairs = ((each, min(len(first.orders), len(each.orders))) for each in others)
        same = [each for each, count in pairs if np.array_equal(first.orders[:count], each.orders[:count])]
        if same:
            numbers = name_numbers([first.number, *(each.number for each in same)])
            lines.append(f"epochs {numbers} have the same order, from step {same[0].first} on")
    return lines


def find_repeats(epochs: list[Epoch], has_ids: bool) -> list[str]:
    """Return a line for each epoch with samples that come twice, or never although another epoch has them.

    has_ids: samples are known by ids. Otherwise, up to a tenth of the samples may be equal to another one, if
    all whole epochs have the same ones twice; and a sample is missing only if another one takes its place.
    """
    tables = [np.unique(np.concatenate(epoch.steps.samples), return_counts=True) for epoch in epochs]
    whole = [table for epoch, table in zip(epochs, tables, strict=True) if epoch.is_whole]
    usual = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    if whole and not has_ids and all(np.array_equal(table, whole[0]) for table in whole):
        several = whole[0][1] > 1
        if several.mean() <= _EQUAL_SHARE:
            usual = whole[0][0][several], whole[0][1][several]
    known, lines = np.unique(np.concatenate([values for values, _ in tables])), []
    for epoch, (values, counts) in zip(epochs, tables, strict=True):
        allowed = np.ones_like(counts)
        _, places, own = np.intersect1d(values, usual[0], assume_unique=True, return_indices=True)
        allowed[places] = usual[1][own]
        twice, never = values[counts > allowed], len(known) - len(values) if epoch.is_whole else 0
        batch = max(map(len, epoch.steps.samples))
        extra = (counts - allowed)[counts > allowed].sum()
        if not has_ids and (never != extra or sum(len(each) for each, _ in tables) == len(known)):
            never = 0  # another augmentation is another content: no sample comes again
        if len(twice):
            step = _find_repeat(epoch.steps, twice)
            missing = f", and {never} never" if never else ""
            text = f"{_count(len(twice))} came twice or more, first in step {step}{missing}"
            lines.append(f"epoch {epoch.number}: {text}")
        elif never >= batch:  # fewer are those of an incomplete batch, which a loader may skip
            lines.append(f"epoch {epoch.number}: {_count(never)} never came, which other epochs have")
    more = [f"{len(lines) - _SHOWN} more epochs with such samples"] if len(lines) > _SHOWN else []
    return lines[:_SHOWN] + more


def _find_repeat(steps: Steps, twice: np.ndarray) -> int:
    """Return the number of the first step in which one of these samples comes again."""
    seen = np.zeros(0, np.uint64)
    for number, samples in zip(steps.numbers.tolist(), steps.samples, strict=True):
        repeated = samples[np.isin(samples, twice)]
        if len(np.unique(repeated)) < len(repeated) or np.isin(repeated, seen).any():
            return int(number)
        seen = np.concatenate([seen, repeated])
    raise ValueError("no sample comes again")


def find_same_ranks(steps: Steps) -> list[str]:
    """Return a line if ranks were given the same samples in a step, else nothing."""
    first, count = "", 0
    for number, samples, sizes in zip(steps.numbers.tolist(), steps.samples, steps.sizes, strict=True):
        ranks: dict[bytes, list[int]] = {}
        for rank, part in enumerate(np.split(samples, np.cumsum(sizes[:-1]))):
            if len(part):
                ranks.setdefault(np.sort(part).tobytes(), []).append(rank)
        same = [each for each in ranks.values() if len(each) > 1]
        count += bool(same)
        if same and not first:
            first = f"ranks {name_numbers(same[0])} were given the same samples in step {number}"
    return [first + (f", and in {count - 1} more" if count > 1 else "")] if first else []


def find_same_contents(epochs: list[Epoch], has_ids: bool) -> list[str]:
    """Return a line if samples look the same in two epochs, for data that are augmented at random."""
    if not has_ids:  # the hashes of contents
        hashes = np.concatenate([np.unique(np.concatenate(epoch.steps.samples)) for epoch in epochs])
        count = len(hashes) - len(np.unique(hashes))
        return [f"{_count(count)} came again with the same content in a later epoch"] if count else []
    # the sum of an epoch is another one if the content of a sample is
    totals: dict[tuple[int, int], list[int]] = {}
    for epoch in epochs:
        if epoch.is_whole:
            totals.setdefault((epoch.orders.sum(), epoch.contents.sum()), []).append(epoch.number)
    same = [numbers for numbers in totals.values() if len(numbers) > 1]
    return [f"epochs {name_numbers(each)} have the same content for each sample" for each in same]


def name_numbers(numbers: list[int]) -> str:
    """Return "1, 2 and 3"; more than six ascending numbers as "1, 2, ... and 9"."""
    shown = [*map(str, numbers if len(numbers) < 7 else [*numbers[:2], numbers[-1]])]
    dots = ", ..." if len(numbers) > 6 else ""
    return f"{', '.join(shown[:-1])}{dots} and {shown[-1]}"


def _count(samples: int) -> str:
    return f"{samples} sample{'s' * (samples != 1)}"
