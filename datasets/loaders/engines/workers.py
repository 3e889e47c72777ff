"""Worker processes that load batches: torch's DataLoader, kept from epoch to epoch."""

import functools
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from common.distributed import preemption


class Workers:
    """Worker processes that load batches. count: of processes; 0: the calling process loads. pinned: return
    batches in pinned memory."""

    def __init__(self, count: int, pinned: bool):
        self.count, self.pinned = count, pinned
        self._loader: DataLoader | None = None
        self._batch_sampler: Any = None
        self._closing = multiprocessing.Value("b", 0, lock=False)
        weakref.finalize(self, _close, self._closing)

    def load(self, dataset: Dataset, batch_sampler: Iterable, collate_fn: Callable) -> Iterator[Any]:
        """Yield collate_fn(dataset.__getitems__(keys)) for each `keys` of the batch sampler.

        The workers, and the dataset and collate_fn that they were started with, are kept as long as the batch
        sampler is the same object.
        """
        if self._loader is None or batch_sampler is not self._batch_sampler:
            self._batch_sampler = batch_sampler
            self._loader = DataLoader(
                dataset,
                batch_sampler=batch_sampler,
                collate_fn=collate_fn,
                num_workers=self.count,
                pin_memory=self.pinned,
                persistent_workers=self.count > 0,
                worker_init_fn=functools.partial(_begin, self._closing),
                generator=torch.Generator(),  # otherwise a seed is drawn from the job's generator
            )
        return iter(self._loader)

    def close(self) -> None:
        """End the workers."""
        _close(self._closing)
        self._loader = self._batch_sampler = None  # its workers end with it


def _begin(closing: Any, worker: int) -> None:
    """Prepare a worker: it ignores SIGTERM until close(), because the job saves after the platform's."""
    preemption.ignore()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if closing.value else None)


def _close(closing: Any) -> None:
    closing.value = 1
