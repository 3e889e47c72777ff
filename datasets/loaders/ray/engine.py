"""An engine whose work is done on the nodes of a Ray cluster: ids and boxes go out, uint8 images come back.

A task holds all that a worker needs, and workers draw no random numbers. So the images do not depend on the
cluster.
"""

import collections
import copy
import itertools
from collections.abc import Callable, Generator, Iterator
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
from datasets.sampling.sampler import Batch, Plan, rows
from datasets.stores.files import FileStore

_CPUS = 0.5  # of a worker: those of training and those of evaluation take turns
_ROWS = 64  # images a task: a larger batch is divided among the workers
_AHEAD = 2  # tasks a worker that are under way while one batch is used
_MISSING = "the nodes of the Ray cluster must see the images under the same path as this one"


class RayEngine:
    """An engine for Loader. cutter: makes the images on the workers. Other arguments are those of Pool."""

    reuses_memory = False

    def __init__(
        self,
        cutter: Any,
        workers: int,
        cpus: float = _CPUS,
        address: str = "auto",
        log: Callable[[str], None] | None = None,
    ):
        self._workers = workers
        self._pool = Pool(cutter, workers, address, cpus, log)

    def run(self, plan: Plan) -> Generator[tuple[Batch, torch.Tensor], None, None]:
        """Yield each batch with its images, uint8 [n, H, W, C]. Raises BadInput."""
        batches: collections.deque = collections.deque()  # (batch, its tasks), oldest first

        def tasks() -> Iterator[tuple]:
            for batch in plan:
                firsts = range(0, max(1, len(batch.ids)), _ROWS)
                batches.append((batch, len(firsts)))
                for first in firsts:
                    last = first + _ROWS
                    yield plan.size, batch.ids[first:last], rows(batch.crops, first, last)

        results = self._pool.map(tasks(), _AHEAD * self._workers)
        try:
            for images in results:
                batch, count = batches.popleft()
                if count > 1:
                    images = np.concatenate([images, *itertools.islice(results, count - 1)])
                yield batch, torch.from_numpy(images)
        except BadInput as error:
            raise BadInput(f"{error}; {_MISSING}" if "No such file" in str(error) else str(error)) from error
        finally:
            results.close()

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


class FolderCutter:
    """Decodes, cuts and resizes images. store: of datasets/stores; the workers must reach what it reads."""

    def __init__(self, store: Any, antialias: bool = True):
        self.store, self.antialias = store, antialias
        if type(store) is FileStore and type(store.index) is ImageFolderIndex:
            self.store = copy.copy(store)
            self.store.index = _Columns(store.index)

    def begin(self, worker: int, workers: int) -> None:
        """Let torch use one thread: a worker has one CPU."""
        torch.set_num_threads(1)

    def __call__(self, task: tuple) -> np.ndarray:
        size, ids, crops = task
        images = np.empty((len(ids), size, size, 3), np.uint8)
        heights, contents = self.store.index.heights, self.store.read(ids)
        for place, (id, content, row) in enumerate(zip(ids, contents, zip(*crops, strict=True), strict=True)):
            image = self.store.decode(int(id), content)
            top, left, height, width, flip = map(int, row)
            scale = image.shape[0] / int(heights[id])
            cut(image, top, left, height, width, flip, images[place], scale, self.antialias)
        return images


class _Columns(ImageFolderIndex):
    """An index that is pickled whole: the workers need not see the folder in which it is kept."""

    def __init__(self, index: ImageFolderIndex):
        for name, value in vars(index).items():
            setattr(self, name, np.array(value) if isinstance(value, np.ndarray) else value)

    def __reduce__(self) -> tuple:
        return object.__new__, (_Columns,), vars(self)


class WindowCutter:
    """Cuts windows out of images in memory. augment: whether the plan's crops need the data set's padding."""

    def __init__(self, data: ImageSet, augment: bool):
        self.images, self.padding = data.images.numpy(), data.padding if augment else 0

    def begin(self, worker: int, workers: int) -> None:
        """Lay the images out."""
        self._windows = Windows(torch.from_numpy(np.array(self.images)), self.padding)

    def __call__(self, task: tuple) -> np.ndarray:
        _, ids, crops = task
        return self._windows(ids, corners(Batch(ids, ids, crops)))


def ray_memory_loader(
    data: ImageSet,
    sampler: Any,
    device: torch.device,
    augment: bool = False,
    workers: int = 2,
    address: str = "auto",
    log: Callable[[str], None] | None = None,
) -> Loader:
    """Return a memory_loader() whose crops and flips are made by workers of a Ray cluster.

    workers, address, log: as Pool takes them. Images that fit in memory are cut faster in this process: this
    shows the change, and that the data are the same.
    """
    engine = RayEngine(WindowCutter(data, augment), workers, 1.0, address, log)
    return Loader(engine, plan_of(data, sampler, augment), device, data.mean, data.std)
