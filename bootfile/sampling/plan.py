"""The batches of an epoch as an engine gets them: ids, labels and crops, chosen before files are read."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from bootfile.ground.errors import BadInput

_CHUNK = 4096  # samples computed at a time: spreads NumPy's cost per call over several steps


class Batch(NamedTuple):
    """One rank's part of one step. ids, labels: int64 [n] (several labels: bool [n, classes]).
    crops: a NamedTuple of arrays [n]; () without augmentation. epoch: of its random numbers
    (BatchSampler.draws). size: side of its images, pixels (Plan.size)."""

    ids: np.ndarray
    labels: np.ndarray
    crops: tuple[Any, ...]
    epoch: int | np.ndarray = 0
    size: int = 0


class Plan:
    """An iterable of the Batches of an epoch, from the position of the sampler.

    index: an ImageFolderIndex, an ImageSet, a PairIndex, or another object with `labels` (integers, by id),
        `fingerprint` and the attributes that `augment` uses.
    sampler: a batch sampler of bootfile/sampling/sampler.py.
    augment: a function of datasets/sampling/augment.py, or another one with the arguments (index, ids, seed,
        epoch) that returns a NamedTuple of arrays [n]. epoch: a number, or one for each id, see draws().
    size: side of the square images that engines deliver, pixels, or a function of the epoch that returns it.
        Engines that deliver whole images ignore it.
    views: images per sample. Sample k has the ids k, len(index) + k and so on.
    `largest`: number of images in the largest batch.
    `removal`: a Removal (removal.py), whose samples no batch has; None by default.
    Raises BadInput if the sampler is another one, such as torch's.
    """

    def __init__(
        self,
        index: Any,
        sampler: Any,
        augment: Callable[[Any, np.ndarray, int, int], tuple[Any, ...]] | None = None,
        size: int | Callable[[int], int] = 224,
        views: int = 1,
    ):
        if not hasattr(sampler, "largest"):
            raise BadInput(
                f"expected a BatchSampler of bootfile, got {type(sampler).__name__}, whose order is lost at "
                "a restart: use BatchSampler(len(dataset), batch_size, seed, epochs), with weights=[...] to "
                "draw samples as WeightedRandomSampler"
            )
        self.index = index
        self.sampler = sampler
        self.augment = augment
        self.views = views
        self._size = size
        self.largest = views * sampler.largest
        self.removal: Any = None
        self._labels = np.asarray(index.labels)

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch."""
        return len(self.sampler)

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of the data, and of the weights with which they are drawn."""
        shares = getattr(self.sampler, "shares", None)
        weights = "" if shares is None else f"+{hashlib.sha256(shares.tobytes()).hexdigest()[:16]}"
        return f"{self.index.fingerprint}{weights}"

    @property
    def size(self) -> int:
        """Return the side of the images of this epoch, pixels."""
        return self._size(self.sampler.epoch) if callable(self._size) else self._size

    @property
    def sizes(self) -> list[int]:
        """Return the sides of the images of all epochs of a training with total_steps, pixels."""
        epochs = -(-self.sampler.total_steps // len(self))
        if callable(self._size):
            return sorted({self._size(epoch) for epoch in range(1, epochs + 1)})
        return [self._size]

    def seek(self, step: int) -> None:
        """Set the position: the next batch is that of global step `step`, counted from 0."""
        self.sampler.seek(step)

    def __iter__(self) -> Iterator[Batch]:
        waiting: list[tuple[np.ndarray, Any]] = []  # (ids, epoch) of the next steps, without labels and crops
        draws = self.removal.cut(self.sampler.draws()) if self.removal else self.sampler.draws()
        for samples, epoch in draws:
            # each view has ids of its own, so it gets crops and seeds of its own
            views = [samples + view * len(self.index) for view in range(self.views)]
            epochs = np.tile(epoch, self.views) if np.ndim(epoch) else epoch
            waiting.append((np.concatenate(views), epochs))
            if sum(len(ids) for ids, _ in waiting) >= _CHUNK:
                yield from self._batches(waiting)
                waiting = []
        if waiting:
            yield from self._batches(waiting)

    def _batches(self, parts: list[tuple[np.ndarray, Any]]) -> Iterator[Batch]:
        """Yield the batches of several steps, whose labels and crops are computed in one call. parts: the ids
        and the epoch of each step."""
        # one computation for several steps; below, it is cut into steps again
        ids = np.concatenate([ids_of_step for ids_of_step, _ in parts])
        # with weights each id has its own number
        epoch: Any = parts[0][1]
        if np.ndim(epoch):
            epoch = np.concatenate([epochs for _, epochs in parts])
        labels = self._labels[ids]
        if labels.dtype.kind in "iu":
            labels = labels.astype(np.int64)
        crops = self.augment(self.index, ids, self.sampler.seed, epoch) if self.augment else ()
        first = 0
        for ids_of_step, epochs in parts:
            end = first + len(ids_of_step)
            yield Batch(ids_of_step, labels[first:end], rows(crops, first, end), epochs, self.size)
            first = end


def rows(crops: tuple[Any, ...], first: int, last: int) -> tuple[Any, ...]:
    """Return some rows of crops, of the same type."""
    return type(crops)(*(column[first:last] for column in crops))
