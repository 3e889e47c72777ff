"""What the steps of an epoch are made of: ids, labels and boxes, a pure function of (seed, epoch, step).

Engines are given a plan and do what it says. What the data are is decided here, before any byte is read.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from datasets.sampling.augment import Crop, center_crop, random_resized_crop

_CHUNK = 2048  # samples whose boxes are computed at a time: NumPy's cost per call, spread over several steps


class Batch(NamedTuple):
    """One process's part of one step: ids int64 [n], labels int64 [n], crops of n rows."""

    ids: np.ndarray
    labels: np.ndarray
    crops: Crop


class Plan:
    """Iterates the Batches of an epoch, from the position of the sampler.

    index: an image_folder.Index. order: a batch sampler of ids. size: pixels of the square images that
    engines deliver. augment: random boxes and mirroring by the seed and epoch of a BatchSampler, of this
    `scale` (share of the area); otherwise center_crop()'s boxes with this `share` of the short side.
    `largest` is the number of samples of the largest batch.
    """

    def __init__(
        self,
        index,
        order,
        size: int = 224,
        augment: bool = False,
        scale: tuple[float, float] = (0.08, 1.0),
        share: float = 224 / 256,
    ):
        self.index, self.order, self.size, self.augment = index, order, size, augment
        self.scale, self.share, self.largest = scale, share, order.largest

    def __len__(self) -> int:
        return len(self.order)

    def seek(self, step: int) -> None:
        """Set the position: the next batch is that of global step `step`, counted from 0."""
        self.order.seek(step)

    def epochs_from(self, step: int) -> Iterator[int]:
        """Yield the remaining epochs, each with the position set (BatchSampler.epochs_from)."""
        return self.order.epochs_from(step)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole training; None if it has no limit."""
        return self.order.total_steps

    def __iter__(self):
        waiting = []
        for ids in self.order:
            waiting.append(ids)
            if sum(map(len, waiting)) >= _CHUNK:
                yield from self._batches(waiting)
                waiting = []
        if waiting:
            yield from self._batches(waiting)

    def _batches(self, parts: list[np.ndarray]):
        ids = np.concatenate(parts)
        widths, heights, labels = self.index.widths[ids], self.index.heights[ids], self.index.labels[ids]
        if self.augment:
            crops = random_resized_crop(self.order.seed, self.order.epoch, ids, widths, heights, self.scale)
        else:
            crops = center_crop(widths, heights, self.share)
        last = 0
        for part in parts:
            first, last = last, last + len(part)
            yield Batch(part, labels[first:last].astype(np.int64), crops.part(first, last))
