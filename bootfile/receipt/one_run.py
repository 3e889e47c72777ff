"""Find what is unusual in one run: epochs with the same order, samples that come twice or never, ranks with
the same samples, augmentation that repeats.

Samples are known by 64-bit hashes of their ids or contents. A run that draws with replacement, or keeps one
order on purpose, has to say so: it looks as a defect does.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

_EQUAL_SHARE = 0.1  # the share of samples that may have the content of another one
_SHOWN = 4  # lines about epochs


class Epoch(NamedTuple):
    """The steps of an epoch that a run kept, in their order.

    number: of the epoch. first: the number of its first step, from 1. orders: sums of the hashes of the
    samples of each step, uint64 [steps]. contents: the same with augmentation. samples: the hashes of each
    step, uint64 [n]; empty if only the sums are known. is_whole: whether it has all steps of an epoch.
    """

    number: int
    first: int
    orders: np.ndarray
    contents: np.ndarray
    samples: list[np.ndarray]
    is_whole: bool = False


def find_unusual(
    steps: list[Any],
    restarts: int,
    repeats: bool = False,
    same_order: bool = False,
    augmented: bool = False,
) -> list[str]:
    """Return lines about what is unusual in the steps that a run kept.

    steps: those of loop_receipt. restarts: their number. repeats: samples may come twice in an epoch or a
    step. same_order: epochs may have the same order. augmented: samples may not have the same content in two
    epochs.
    """
    found = []
    for number in sorted({step.epoch for step in steps if step.epoch}):
        first = next(k for k, step in enumerate(steps, 1) if step.epoch == number)
        own = [step for step in steps if step.epoch == number]
        sums = np.array([step.sums for step in own], np.uint64)
        found.append(Epoch(number, first, sums[:, 0], sums[:, 2], [step.samples for step in own]))
    epochs = mark_whole(found, restarts)
    has_ids = any((each.orders != each.contents).any() for each in epochs)
    lines = [] if same_order else find_same_orders(epochs)
    if not repeats:
        lines += find_repeats(epochs, has_ids)
        lines += find_same_ranks((step.samples, step.sizes) for step in steps)
    return lines + (find_same_contents(epochs, has_ids) if augmented else [])


def mark_whole(epochs: Iterable[Epoch], restarts: int) -> list[Epoch]:
    """Return the epochs. Whole are those with the most steps, if at least two have as many; without restarts
    also all before the last one."""
    epochs = list(epochs)
    counts = Counter(len(each.orders) for each in epochs)
    most = max(counts, default=0)
    ended = epochs[:-1] if not restarts else []
    same = [each for each in epochs if counts[most] > 1 and len(each.orders) == most]
    numbers = {each.number for each in (*ended, *same)}
    return [each._replace(is_whole=each.number in numbers) for each in epochs]


def find_same_orders(epochs: list[Epoch]) -> list[str]:
    """Return a line for epochs whose steps have the same samples in the same order, at least two steps."""
    groups: dict[tuple, list[Epoch]] = {}
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
    tables = [np.unique(np.concatenate(each.samples), return_counts=True) for each in epochs]
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
        batch = max(map(len, epoch.samples))
        extra = (counts - allowed)[counts > allowed].sum()
        if not has_ids and (never != extra or sum(len(each) for each, _ in tables) == len(known)):
            never = 0  # another augmentation is another content: no sample comes again
        if len(twice):
            step = epoch.first + _find_repeat(epoch.samples, twice)
            missing = f", and {never} never" if never else ""
            text = f"{_count(len(twice))} came twice or more, first in step {step}{missing}"
            lines.append(f"epoch {epoch.number}: {text}")
        elif never >= batch:  # fewer are those of an incomplete batch, which a loader may skip
            lines.append(f"epoch {epoch.number}: {_count(never)} never came, which other epochs have")
    more = [f"{len(lines) - _SHOWN} more epochs with such samples"] if len(lines) > _SHOWN else []
    return lines[:_SHOWN] + more


def _find_repeat(steps: list[np.ndarray], twice: np.ndarray) -> int:
    """Return the first step in which one of these samples comes again, from 0."""
    seen = np.zeros(0, np.uint64)
    for number, samples in enumerate(steps):
        found = samples[np.isin(samples, twice)]
        if len(np.unique(found)) < len(found) or np.isin(found, seen).any():
            return number
        seen = np.concatenate([seen, found])
    return 0


def find_same_ranks(steps: Iterable[tuple[np.ndarray, tuple[int, ...]]]) -> list[str]:
    """Return a line if ranks were given the same samples in a step, else nothing.

    steps: (hashes uint64 [n] of the samples, rank after rank; the number of samples of each rank).
    """
    first, count = "", 0
    for number, (samples, sizes) in enumerate(steps, 1):
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
        parts = [np.unique(np.concatenate(each.samples)) for each in epochs if each.samples]
        hashes = np.concatenate(parts) if parts else np.zeros(0, np.uint64)
        count = len(hashes) - len(np.unique(hashes))
        return [f"{_count(count)} came again with the same content in a later epoch"] if count else []
    # the sum of an epoch is another one if the content of a sample is
    totals: dict[tuple, list[int]] = {}
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
