"""Find what is unusual in one run: epochs with the same order, samples that come twice or never, ranks with
the same samples, augmentation that repeats.

Samples are known by 64-bit hashes of their ids or contents. A run that draws with replacement, or keeps one
order on purpose, has to say so: it looks as a defect does.
"""

import operator
from collections import Counter
from typing import NamedTuple

import numpy as np

from bootfile.ground.numbers import counted
from bootfile.receipt.steps import Steps

_EQUAL_SHARE = 0.1  # the share of samples that may have the content of another one
_SHOWN = 4  # lines about epochs


class Options(NamedTuple):
    """What one run may do without being unusual."""

    repeats: bool = False  # samples may come twice in an epoch, or on two ranks
    same_order: bool = False  # epochs may have the same order
    augmented: bool = False  # samples may not look the same in two epochs


class Epoch(NamedTuple):
    """The steps of an epoch that a run kept. is_whole: whether it has all steps of an epoch."""

    number: int
    steps: Steps
    is_whole: bool = False

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
    epochs = [Epoch(int(number), steps.select(steps.epochs == number)) for number in np.unique(steps.epochs)]
    # a loop without ids writes the hashes of contents for both
    has_ids = not steps.samples or any((epoch.orders != epoch.contents).any() for epoch in epochs)
    epochs = mark_whole(epochs, restarts)
    lines = []
    # what each line names may be right in this run: the options say so
    if not options.same_order:
        lines += find_same_orders(epochs)
    if steps.samples and not options.repeats:
        repeats = find_repeats(epochs, has_ids)
        if repeats and len(epochs) <= restarts + 1:  # no start has recorded a second epoch
            repeats[-1] += "; if watch() got several epochs at once, call it once for each epoch"
        lines += [*repeats, *find_same_ranks(steps)]
    if options.augmented:
        lines += find_same_contents(epochs, has_ids)
    return lines


def mark_whole(epochs: list[Epoch], restarts: int) -> list[Epoch]:
    """Return the epochs with is_whole. An epoch is whole if it has the most steps and another one has as
    many, or, without restarts, if it is not the last one."""
    counts = Counter(len(epoch.steps) for epoch in epochs)
    most = max(counts, default=0)
    longest = [epoch.number for epoch in epochs if counts[most] > 1 and len(epoch.steps) == most]
    # a restart may have cut an epoch before the last one
    followed = [] if restarts else [epoch.number for epoch in epochs[:-1]]
    return [epoch._replace(is_whole=epoch.number in (*longest, *followed)) for epoch in epochs]


def find_same_orders(epochs: list[Epoch]) -> list[str]:
    """Return a line for epochs whose steps have the same samples in the same order, at least two steps."""
    # the first two steps -> the epochs that begin with them: no other pairs of epochs are compared
    groups: dict[tuple[int, ...], list[Epoch]] = {}
    for epoch in (epoch for epoch in epochs if len(epoch.orders) > 1):
        groups.setdefault(tuple(epoch.orders[:2].tolist()), []).append(epoch)
    lines = []
    for first, *others in groups.values():
        # a run may end within an epoch: the steps that both have are compared
        pairs = [(epoch, min(len(first.orders), len(epoch.orders))) for epoch in others]
        same = [epoch for epoch, count in pairs if np.array_equal(first.orders[:count], epoch.orders[:count])]
        if same:
            names = name_numbers([epoch.number for epoch in (first, *same)])
            lines.append(f"epochs {names} have the same order, from step {same[0].steps.numbers[0]} on")
    return lines


def find_repeats(epochs: list[Epoch], has_ids: bool) -> list[str]:
    """Return a line for each epoch with samples that come twice, or never although another epoch has them.

    has_ids: samples are known by ids. Otherwise, up to a tenth of the samples may be equal to another one, if
    all whole epochs have the same ones twice; and a sample is missing only if another one takes its place.
    """
    # how often each sample of an epoch comes
    tables = [np.unique(np.concatenate(epoch.steps.samples), return_counts=True) for epoch in epochs]
    all_samples = np.unique(np.concatenate([samples for samples, _ in tables]))
    # with random augmentation, no content of an epoch comes again in another one
    is_each_epoch_new = sum(len(samples) for samples, _ in tables) == len(all_samples)
    usual_samples, usual_counts = _find_usual_repeats(epochs, [] if has_ids else tables)
    lines = []
    for epoch, (samples, counts) in zip(epochs, tables, strict=True):
        # once, or as often as equal contents come in every epoch
        allowed = np.ones_like(counts)
        _, places, usual_places = np.intersect1d(
            samples, usual_samples, assume_unique=True, return_indices=True
        )
        allowed[places] = usual_counts[usual_places]
        is_repeated = counts > allowed
        repeated = samples[is_repeated]
        extra = (counts - allowed)[is_repeated].sum()
        never = len(all_samples) - len(samples) if epoch.is_whole else 0
        # by its content a sample is missing only if another one takes its place: else it was augmented again
        if not has_ids and (never != extra or is_each_epoch_new):
            never = 0
        batch = max(map(len, epoch.steps.samples))
        if len(repeated):
            step = _find_repeat(epoch.steps, repeated)
            text = f"{counted(len(repeated), 'sample')} came twice or more, first in step {step}"
            lines.append(f"epoch {epoch.number}: {text}{f', and {never} never' if never else ''}")
        elif never >= batch:  # fewer are those of an incomplete batch, which a loader may skip
            text = f"{counted(never, 'sample')} never came, which other epochs have"
            lines.append(f"epoch {epoch.number}: {text}")
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], f"{more} more epochs with such samples"] if more > 0 else lines


def _find_usual_repeats(
    epochs: list[Epoch], tables: list[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the contents that come several times in each whole epoch, uint64 [n], and how often, int64 [n].

    Data may have equal samples. None are returned if the whole epochs do not have the same ones, or if they
    are more than _EQUAL_SHARE. tables: for each epoch (the different contents, how often each one comes).
    """
    # a part of an epoch may not have come to the second one of two equal samples
    whole = [table for epoch, table in zip(epochs, tables, strict=False) if epoch.is_whole]
    if whole and all(np.array_equal(table, whole[0]) for table in whole):
        samples, counts = whole[0]
        is_repeated = counts > 1
        if is_repeated.mean() <= _EQUAL_SHARE:
            return samples[is_repeated], counts[is_repeated]
    return np.zeros(0, np.uint64), np.zeros(0, np.int64)


def _find_repeat(steps: Steps, twice: np.ndarray) -> int:
    """Return the number of the first step in which one of these samples comes again."""
    samples = np.concatenate(steps.samples)
    numbers = np.repeat(steps.numbers, [*map(len, steps.samples)])
    is_chosen = np.isin(samples, twice)
    _, first_places = np.unique(samples[is_chosen], return_index=True)
    return int(np.delete(numbers[is_chosen], first_places).min())


def find_same_ranks(steps: Steps) -> list[str]:
    """Return a line if ranks were given the same samples in a step, else nothing."""
    shared = []  # (step, the first ranks that share their samples)
    for number, samples, sizes in zip(steps.numbers.tolist(), steps.samples, steps.sizes, strict=True):
        ranks: dict[bytes, list[int]] = {}  # the samples of a rank, in any order -> the ranks that have them
        for rank, part in enumerate(np.split(samples, np.cumsum(sizes[:-1]))):
            ranks.setdefault(np.sort(part).tobytes(), []).append(rank)
        ranks.pop(b"", None)
        if groups := [group for group in ranks.values() if len(group) > 1]:
            shared.append((number, groups[0]))
    if not shared:
        return []
    step, group = shared[0]
    more = f", and in {len(shared) - 1} more" if len(shared) > 1 else ""
    return [f"ranks {name_numbers(group)} were given the same samples in step {step}{more}"]


def find_same_contents(epochs: list[Epoch], has_ids: bool) -> list[str]:
    """Return a line if samples look the same in two epochs, for data that are augmented at random."""
    if not has_ids:  # the hashes of contents
        contents = np.concatenate([np.unique(np.concatenate(epoch.steps.samples)) for epoch in epochs])
        count = len(contents) - len(np.unique(contents))
        line = f"{counted(count, 'sample')} came again with the same content in a later epoch"
        return [line] if count else []
    # the sum of an epoch is another one if the content of a sample is
    totals: dict[tuple[int, int], list[int]] = {}
    for epoch in filter(operator.attrgetter("is_whole"), epochs):
        totals.setdefault((epoch.orders.sum(), epoch.contents.sum()), []).append(epoch.number)
    same = [numbers for numbers in totals.values() if len(numbers) > 1]
    return [f"epochs {name_numbers(numbers)} have the same content for each sample" for numbers in same]


def name_numbers(numbers: list[int]) -> str:
    """Return "1, 2 and 3"; more than six ascending numbers as "1, 2, ... and 9"."""
    shown = [*map(str, numbers)]
    if len(shown) > 6:
        shown = [*shown[:2], "...", shown[-1]]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"
