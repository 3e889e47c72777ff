"""An engine whose batches are made by workers; and the worker processes of torch's DataLoader."""

import functools
import gc
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from common.distributed import preemption
from common.ground.exits import BadInput
from datasets.loaders.loader import Images
from datasets.sampling.sampler import Batch, Plan


class WorkerEngine:
    """An engine for Loader.

    workers: a Workers, or an object with its methods. function: called by the workers with (batch, size of
    the images); it returns the images, uint8 [n, H, W, C].
    """

    reuses_memory = False

    def __init__(self, workers: Any, function: Callable[[Batch, int], Any]):
        self._workers, self._function = workers, function

    def run(self, plan: Plan) -> Images:
        for batch, images in self._workers.load(plan, self._function):
            yield batch, torch.as_tensor(images)

    def close(self) -> None:
        self._workers.close()


class Workers:
    """Worker processes of a DataLoader, kept from epoch to epoch. count: of processes; 0: the calling process
    loads. pinned: return batches in pinned memory."""

    def __init__(self, count: int, pinned: bool):
        self.count, self.pinned = count, pinned
        self._loader: DataLoader | None = None
        self._plan: Plan | None = None
        self._closing = multiprocessing.Value("b", 0, lock=False)
        weakref.finalize(self, _close, self._closing)

    def load(self, plan: Plan, function: Callable[[Batch, int], Any]) -> Iterator[tuple[Batch, Any]]:
        """Yield (batch, function(batch, plan.size)) for each batch of a plan. Raises the function's BadInput.

        The workers, and the function that they were started with, are kept as long as the plan is the same
        object.
        """
        if self._loader is None or plan is not self._plan:
            self._plan = plan
            self._loader = self._open(
                _Results(function),
                batch_size=None,
                sampler=_Keys(plan),
                collate_fn=_unchanged,
                num_workers=self.count,
                persistent_workers=self.count > 0,
                generator=torch.Generator(),  # otherwise a seed is drawn from the job's generator
            )
            gc.collect()  # a worker that deletes a pipeline of DALI would wait for its threads for ever
        for batch, result in self._loader:
            if isinstance(result, BadInput):
                raise result
            yield batch, result

    def close(self) -> None:
        """End the workers."""
        _close(self._closing)
        self._loader = self._plan = None  # its workers end with it

    def _open(self, results: Dataset, **options: Any) -> DataLoader:
        begin = functools.partial(_begin, self._closing)
        return DataLoader(results, pin_memory=self.pinned, worker_init_fn=begin, **options)


class _Keys:
    """An iterable of (batch, size of the images) of each step."""

    def __init__(self, plan: Plan):
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        for batch in self.plan:
            yield batch, self.plan.size


class _Results(Dataset):
    """The results of a function by its arguments. A BadInput is returned, because a raised error would become
    the text of a traceback."""

    def __init__(self, function: Callable[[Batch, int], Any]):
        self.function = function

    def __getitem__(self, key: tuple[Batch, int]) -> tuple[Batch, Any]:
        try:
            return key[0], self.function(*key)
        except BadInput as error:
            return key[0], error


def _unchanged(value: Any) -> Any:
    return value


def _begin(closing: Any, worker: int) -> None:
    """Prepare a worker: it ignores SIGTERM until close(), because the job saves after the platform's."""
    preemption.ignore()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if closing.value else None)


def _close(closing: Any) -> None:
    closing.value = 1
