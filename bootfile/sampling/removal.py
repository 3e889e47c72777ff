"""Leave samples out of the batches of a run: the others keep their batch, their crops and their seeds."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from bootfile.sampling.sampler import BatchSampler


class Removal:
    """The samples that the batches of a loader do not have: int64 [n]. Loader.removal and Plan.removal have
    one."""

    def __init__(self, ids: np.ndarray):
        self.ids = ids
        self._counted: tuple[int, int] | None = None  # (step, parts) of _counts
        self._counts: tuple[int, ...] = ()

    def find_rest(self, ids: np.ndarray) -> np.ndarray:
        """Return which samples of a batch stay, bool [n]. ids: int64 [n]."""
        return np.isin(ids, self.ids, invert=True)

    def cut(self, draws: Iterable[tuple[np.ndarray, Any]]) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield the draws of a sampler (BatchSampler.draws) with the ids that stay. If none of a batch stays,
        it has all: the loop gets a batch, and what it computes is thrown away."""
        for ids, epoch in draws:
            rest = self.find_rest(ids)
            rest |= not rest.any()
            yield ids[rest], epoch[rest] if np.ndim(epoch) else epoch

    def takes_all(self, ids: np.ndarray) -> bool:
        """Return whether no sample of a batch stays; also of one that cut() has yielded."""
        return len(ids) > 0 and not self.find_rest(ids).any()

    def count(self, sampler: BatchSampler, step: int, parts: int = 1) -> tuple[int, ...]:
        """Return how many samples stay in each of the equal parts of a step, over all ranks."""
        if self._counted != (step, parts):  # a loop asks several times in a step
            ids = sampler.for_rank(0, 1).batch(step - 1)
            rests = np.array_split(self.find_rest(ids), parts)
            self._counts = tuple(int(rest.sum()) for rest in rests)
            self._counted = (step, parts)
        return self._counts
