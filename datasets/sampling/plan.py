"""The samples of each step: ids, labels and crops, a pure function of (seed, epoch, step).

Engines receive a plan and deliver its batches. Which data a step gets is decided here, before any byte is
read.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

_CHUNK = 4096  # samples whose crops are computed at a time: NumPy's cost per call, spread over several steps


class Batch(NamedTuple):
    """One rank's part of one step. ids, labels: int64 [n]. crops: a NamedTuple of arrays [n]; () without
    augmentation."""

    ids: np.ndarray
    labels: np.ndarray
    crops: tuple


class Plan:
    """Iterates the Batches of an epoch, from the position of the sampler.

    index: has `labels` (integers, by id), `fingerprint` and what `augment` needs: an ImageFolderIndex, an
    ImageSet, a PairIndex. sampler: a batch sampler of datasets/sampling/sampler.py. augment(index, ids, seed,
    epoch): a function of datasets/sampling/augment.py, or another one that returns a NamedTuple of arrays
    [n]. size: side of the square images that engines deliver, pixels; ignored by those that deliver whole
    images. views: images of a sample; those of sample k have the ids k, len(index) + k and so on.

    largest: the number of images in the largest batch.
    """

    def __init__(
        self,
        index: Any,
        sampler: Any,
        augment: Callable[[Any, np.ndarray, int, int], tuple] | None = None,
        size: int = 224,
        views: int = 1,
    ):
        self.index, self.sampler, self.augment, self.size, self.views = index, sampler, augment, size, views
        self.largest = views * sampler.largest
        self._labels = np.asarray(index.labels)

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch."""
        return len(self.sampler)

    def seek(self, step: int) -> None:
        """Set the position: the next batch is that of global step `step`, counted from 0."""
        self.sampler.seek(step)

    def epochs_from(self, step: int) -> Iterator[int]:
        """Yield the remaining epochs, each with the position set (BatchSampler.epochs_from)."""
        return self.sampler.epochs_from(step)

    @property
    def total_steps(self) -> int | Any:
        """Return the steps of the whole training; None if it has no limit."""
        return self.sampler.total_steps

    def __iter__(self) -> Iterator[Batch]:
        waiting: list[np.ndarray] = []
        for samples in self.sampler:
            views = [samples + view * len(self.index) for view in range(self.views)]
            waiting.append(np.concatenate(views))
            if sum(map(len, waiting)) >= _CHUNK:
                yield from self._batches(waiting)
                waiting = []
        if waiting:
            yield from self._batches(waiting)

    def _batches(self, parts: list[np.ndarray]) -> Iterator[Batch]:
        ids = np.concatenate(parts)
        labels, crops = self._labels[ids], ()
        if labels.dtype.kind in "iu":
            labels = labels.astype(np.int64)
        if self.augment:
            crops = self.augment(self.index, ids, self.sampler.seed, self.sampler.epoch)
        last = 0
        for part in parts:
            first, last = last, last + len(part)
            yield Batch(part, labels[first:last], rows(crops, first, last))


def rows(crops: tuple, first: int, last: int) -> tuple:
    """Return some rows of crops, of the same type."""
    return type(crops)(*(column[first:last] for column in crops))
