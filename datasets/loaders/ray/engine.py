"""Engines on actors of Ray: they send ids and boxes, and receive uint8 images or the batches of a Dataset.

A task contains all parameters, and workers draw no other random numbers. So the cluster changes no data.
"""

import collections
import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from common.ground.exits import BadInput
from datasets.folders.image_folder import ImageFolderIndex
from datasets.folders.resize import fit
from datasets.loaders.engines.map_style import Fetcher, MapStyle, build_loader
from datasets.loaders.engines.memory import Windows, corners, plan_of
from datasets.loaders.loader import Images, Loader
from datasets.loaders.ray.pool import Pool
from datasets.memory.image_set import ImageSet
from datasets.sampling.sampler import Batch, Plan, rows
from datasets.stores.files import FileStore

_CPUS = 0.5  # per worker: the workers of training and of evaluation do not run at the same time
_ROWS = 64  # images per task: a larger batch is divided among the workers
_MISSING = "all nodes of the Ray cluster need the images at the same path as this one"


class RayWorkers:
    """Actors that run one function, with the methods of engines/workers.py. The arguments are those of
    Pool."""

    def __init__(self, count: int, cpus: float, address: str):
        self._arguments = count, address, cpus
        self._pool: Pool | None = None

    def map(self, function: Callable, tasks: Iterable[tuple]) -> Iterator[tuple[tuple, Any]]:
        """Yield (task, function(*task)) for each task, in order. The first call sends the function to the
        actors, and later calls must have the same."""
        if self._pool is None:
            self._pool = Pool(*self._arguments)
            self._function = self._pool.put(functools.partial(_run, function))
        return self._pool.map(self._function, tasks)

    def load(self, plan: Plan, function: Callable) -> Iterator[tuple[Batch, Any]]:
        """Yield (batch, function(batch, plan.size)) for each batch of a plan."""
        for (batch, _), result in self.map(function, ((batch, plan.size) for batch in plan)):
            yield batch, result

    def close(self) -> None:
        """End the actors."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None


def _run(function: Callable, numbered: tuple[int, tuple]) -> Any:
    return function(*numbered[1])


class RayEngine:
    """An engine for Loader. cutter: a function (size, ids, crops) that makes images. The other arguments are
    those of Pool."""

    reuses_memory = False

    def __init__(self, cutter: Any, workers: int, cpus: float = _CPUS, address: str = "auto"):
        self._cutter, self._workers = cutter, RayWorkers(workers, cpus, address)

    def run(self, plan: Plan) -> Images:
        """Yield each batch with its images, uint8 [n, H, W, C]. Raises BadInput."""
        batches: collections.deque = collections.deque()  # (batch, its tasks), oldest first

        def tasks() -> Iterator[tuple]:
            for batch in plan:
                firsts = range(0, max(1, len(batch.ids)), _ROWS)
                batches.append((batch, len(firsts)))
                for first in firsts:
                    last = first + _ROWS
                    yield plan.size, batch.ids[first:last], rows(batch.crops, first, last)

        try:
            results = (images for _, images in self._workers.map(self._cutter, tasks()))
            for first in results:
                batch, count = batches.popleft()
                images = np.concatenate([first, *itertools.islice(results, count - 1)])
                yield batch, torch.from_numpy(images)
        except BadInput as error:
            if "No such file" in str(error):
                raise BadInput(f"{error}; {_MISSING}") from error
            raise

    def close(self) -> None:
        """End the workers."""
        self._workers.close()


class FolderCutter:
    """A cutter that decodes, crops and resizes images. The workers must be able to read the store."""

    def __init__(self, store: Any, antialias: bool = True):
        self.store, self.antialias = store, antialias
        if type(store) is FileStore and type(store.index) is ImageFolderIndex:
            self.store = copy.copy(store)
            self.store.index = _Columns(store.index)

    def __call__(self, size: int, ids: np.ndarray, crops: tuple) -> np.ndarray:
        images = np.empty((len(ids), size, size, 3), np.uint8)
        heights, contents = self.store.index.heights, self.store.read(ids)
        for place, (id, content, row) in enumerate(zip(ids, contents, zip(*crops, strict=True), strict=True)):
            top, left, height, width, flip = map(int, row)
            pixels = self.store.crop(int(id), content, int(heights[id]), (top, left, height, width))
            fit(pixels, flip, images[place], self.antialias)
        return images


class _Columns(ImageFolderIndex):
    """An index that is pickled with its arrays, so the workers do not need its folder."""

    def __init__(self, index: ImageFolderIndex):
        for name, value in vars(index).items():
            setattr(self, name, np.array(value) if isinstance(value, np.ndarray) else value)

    def __reduce__(self) -> tuple:
        return object.__new__, (_Columns,), vars(self)


class WindowCutter:
    """A cutter of images in memory. augment: whether the plan's crops need the data set's padding."""

    def __init__(self, data: ImageSet, augment: bool):
        self.images, self.padding = data.images.numpy(), data.padding if augment else 0
        self.reflect = data.reflect

    @functools.cached_property
    def _windows(self) -> Windows:
        return Windows(torch.from_numpy(np.array(self.images)), self.padding, self.reflect)

    def __call__(self, size: int, ids: np.ndarray, crops: tuple) -> np.ndarray:
        return self._windows(ids, corners(Batch(ids, ids, crops)))


def ray_map_style_loader(
    dataset: Any,
    sampler: Any,
    device: torch.device,
    augment: bool = False,
    *,
    collate_fn: Callable[[list], Any] | None = None,
    workers: int = 2,
    address: str = "auto",
) -> Loader:
    """Return a map_style_loader() whose batches are read by actors of Ray.

    augment: not used. workers, address: as in Pool. The dataset with its tensors is sent to the actors
    once.
    """
    fetcher = Fetcher(dataset, collate_fn)
    engine = MapStyle(fetcher, RayWorkers(workers, 1.0, address))
    return build_loader(engine, fetcher, sampler, device)


def ray_memory_loader(
    data: ImageSet,
    sampler: Any,
    device: torch.device,
    augment: bool = False,
    workers: int = 2,
    address: str = "auto",
) -> Loader:
    """Return a make_loader() whose crops and flips are made by actors of Ray.

    workers, address: as in Pool. Images that fit in memory are cropped faster in this process. This
    loader shows the necessary change, and delivers the same data.
    """
    engine = RayEngine(WindowCutter(data, augment), workers, 1.0, address)
    return Loader(engine, plan_of(data, sampler, augment), device, data.mean, data.std)
