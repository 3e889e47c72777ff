"""Leave samples out of the batches of a run: the others keep their batch, their crops and their seeds."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from bootfile.sampling.sampler import BatchSampler


class Removal:
    """The samples that the batches of a loader do not have. Loader.removal and Plan.removal have one.

    ids: int64 [n]. step, ids_of_step: a step, counted from 1, and further samples that only its batch does
    not have (`launch data --guilty`).
    """

    def __init__(self, ids: np.ndarray, step: int = 0, ids_of_step: np.ndarray | None = None):
        self.ids = ids
        self._step = step
        self._ids_of_step = ids_of_step
        self._counted: tuple[int, int] | None = None  # (step, parts) of _counts
        self._counts: tuple[int, ...] = ()

    def find_rest(self, ids: np.ndarray, step: int) -> np.ndarray:
        """Return which samples of a step stay, bool [n]. ids: int64 [n]. step: counted from 1."""
        rest = np.isin(ids, self.ids, invert=True)
        if self._ids_of_step is not None and step == self._step:
            rest &= np.isin(ids, self._ids_of_step, invert=True)
        return rest

    def cut(
        self, draws: Iterable[tuple[np.ndarray, Any]], sampler: BatchSampler
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield the draws of a sampler from its position on (BatchSampler.draws) with the ids that stay. If
        none of a batch stays, it has all: the loop gets a batch, and what it computes is thrown away."""
        first = sampler.step
        for number, (ids, epoch) in enumerate(draws):
            rest = self.find_rest(ids, first + number // sampler.shards + 1)
            rest |= not rest.any()
            yield ids[rest], epoch[rest] if np.ndim(epoch) else epoch

    def takes_all(self, ids: np.ndarray, step: int) -> bool:
        """Return whether no sample of a batch stays; also of one that cut() has yielded."""
        return len(ids) > 0 and not self.find_rest(ids, step).any()

    def count(self, sampler: BatchSampler, step: int, parts: int = 1) -> tuple[int, ...]:
        """Return how many samples stay in each of the equal parts of a step, over all ranks."""
        if self._counted != (step, parts):  # a loop asks several times in a step
            ids = sampler.for_rank(0, 1).batch(step - 1)
            rests = np.array_split(self.find_rest(ids, step), parts)
            self._counts = tuple(int(rest.sum()) for rest in rests)
            self._counted = (step, parts)
        return self._counts
