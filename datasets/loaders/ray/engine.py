"""Our loaders with their work done on a Ray cluster's nodes: rows of ids and boxes go out, uint8 comes back.

What a worker is told is all that it needs: no worker draws random numbers, and none knows of batches. So what
arrives is the same from any cluster, and from none.
"""

import collections
import copy
import itertools
from typing import Any

import numpy as np
import torch

from common.exits import BadInput
from datasets.folders.cut import cut
from datasets.folders.image_folder import ImageFolderIndex
from datasets.loaders.engines.memory import Windows, corners, plan_of
from datasets.loaders.loader import Loader
from datasets.loaders.ray.pool import Pool
from datasets.memory.image_set import ImageSet
from datasets.sampling.augment import CropFlip
from datasets.sampling.plan import Batch, Plan, rows
from datasets.stores.files import FileStore

_CPUS = 0.5  # of a worker: those of training and those of evaluation take turns
_ROWS = 64  # images a task: a larger batch is divided among the workers
_AHEAD = 2  # tasks a worker that are under way while one batch is used
_MISSING = "the nodes of the Ray cluster must see the images under the same path as this one"


class RayEngine:
    """An engine for Loader. store: of datasets/stores; the workers must reach what it reads. workers:
    actors; two of them share a CPU. address: as Pool takes it. say: takes a line of text."""

    reuses_memory = False

    def __init__(self, store, workers: int, antialias: bool = True, address: str = "auto", say=None):
        self.store, self.workers, self.antialias = store, workers, antialias
        self.address, self._say, self._pool = address, say, None
        self._keys = itertools.count()

    def run(self, plan: Plan):
        if self._pool is None:
            function = _Cutter(_shipped(self.store), plan.size, self.antialias)
            self._pool = Pool(function, self.workers, self.address, _CPUS, self._say)
        waiting: collections.deque = collections.deque()  # (batch, keys of its parts), oldest first
        batches, under_way = iter(plan), 0
        try:
            while True:
                while under_way <= _AHEAD * self.workers and (batch := next(batches, None)):
                    waiting.append((batch, self._submit(batch, plan.size)))
                    under_way += len(waiting[-1][1])
                if not waiting:
                    return
                batch, keys = waiting[0]
                parts = []
                while keys:
                    parts.append(self._taken(keys[0]))
                    keys.pop(0)
                    under_way -= 1
                waiting.popleft()
                images = parts[0] if len(parts) == 1 else np.concatenate(parts)
                yield batch, torch.from_numpy(images)
                del images, parts  # its memory may be used again
        finally:
            if self._pool:
                self._pool.forget([key for _, keys in waiting for key in keys])

    def close(self) -> None:
        if self._pool:
            self._pool.close()
        self._pool = None

    def _submit(self, batch: Batch, size: int) -> list[tuple]:
        keys = []
        for first in range(0, max(1, len(batch.ids)), _ROWS):
            keys.append((next(self._keys),))
            crops = rows(batch.crops, first, first + _ROWS)
            self._pool.submit(keys[-1], (size, batch.ids[first : first + _ROWS], tuple(crops)))
        return keys

    def _taken(self, key: tuple) -> np.ndarray:
        try:
            return self._pool.take(key)
        except BadInput as error:
            if "No such file" in str(error):
                raise BadInput(f"{error}; {_MISSING}") from error
            raise


class _Cutter:
    """What a worker does: decode, cut and resize rows of images."""

    def __init__(self, store, size: int, antialias: bool):
        self.store, self.size, self.antialias = store, size, antialias

    def begin(self, worker: int, workers: int) -> None:
        torch.set_num_threads(1)  # a worker has one CPU

    def __call__(self, task: tuple) -> np.ndarray:
        size, ids, crops = task
        images = np.empty((len(ids), size, size, 3), np.uint8)
        heights = self.store.index.heights
        contents = self.store.read(ids)
        for place, (id, content, row) in enumerate(zip(ids, contents, zip(*crops, strict=True), strict=True)):
            image = self.store.decode(int(id), content)
            cut(image, *map(int, row), images[place], image.shape[0] / int(heights[id]), self.antialias)
        return images


class _Shipped(ImageFolderIndex):
    """An index that goes to the workers whole: they need not see the folder in which it is kept."""

    def __init__(self, columns: dict):
        vars(self).update(columns)

    def __reduce__(self):
        return _Shipped, (vars(self),)


def _shipped(store):
    if type(store) is not FileStore or type(store.index) is not ImageFolderIndex:
        return store
    store = copy.copy(store)
    store.index = _Shipped(
        {
            name: np.array(value) if isinstance(value, np.ndarray) else value
            for name, value in vars(store.index).items()
        }
    )
    return store


def ray_memory_loader(
    data: ImageSet,
    sampler: Any,
    device: torch.device,
    augment: bool = False,
    workers: int = 2,
    address: str = "auto",
    say=None,
) -> Loader:
    """Return a memory_loader() whose crops and flips are made by workers of a Ray cluster.

    workers, address, say: as RayEngine takes them. For images that fit in memory this costs more than it
    gains: it shows the change, and that the data are the same.
    """
    engine = RayMemory(data, augment, workers, address, say)
    return Loader(engine, plan_of(data, sampler, augment), device, data.mean, data.std)


class RayMemory:
    """An engine for ray_memory_loader()."""

    reuses_memory = False

    def __init__(self, data: ImageSet, augment: bool, workers: int, address: str, say):
        function = _WindowCutter(data.images.numpy(), data.padding if augment else 0)
        self._pool = Pool(function, workers, address, say=say)
        self._ahead, self._keys = _AHEAD * workers, itertools.count()

    def run(self, plan: Plan):
        waiting: collections.deque = collections.deque()  # (key, batch), oldest first
        batches = iter(plan)
        try:
            while True:
                while len(waiting) <= self._ahead and (batch := next(batches, None)):
                    waiting.append(((next(self._keys),), batch))
                    self._pool.submit(waiting[-1][0], (batch.ids, tuple(corners(batch))))
                if not waiting:
                    return
                key, batch = waiting.popleft()
                yield batch, torch.from_numpy(self._pool.take(key))
        finally:
            self._pool.forget([key for key, _ in waiting])

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


class _WindowCutter:
    """What a worker does: the windows of some images. images: uint8 [N, C, H, W]."""

    def __init__(self, images: np.ndarray, padding: int):
        self.images, self.padding = images, padding

    def begin(self, worker: int, workers: int) -> None:
        self._windows = Windows(torch.from_numpy(np.array(self.images)), self.padding)

    def __call__(self, task: tuple) -> np.ndarray:
        ids, parameters = task
        return self._windows(ids, CropFlip(*parameters))
