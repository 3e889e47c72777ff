"""Loaders whose batches are made by actors of Ray: they get ids and boxes, and return images or items.

A task contains all parameters, and workers draw no other random numbers. So the cluster changes no data.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from common.ground.exits import BadInput
from datasets.folders.image_folder import ImageFolderIndex
from datasets.folders.resize import fit
from datasets.loaders.engines.map_style import Fetcher, MapStyle, build_loader
from datasets.loaders.engines.memory import Memory, plan_of
from datasets.loaders.engines.workers import WorkerEngine
from datasets.loaders.loader import Loader
from datasets.loaders.ray.pool import Pool
from datasets.memory.image_set import ImageSet
from datasets.sampling.sampler import Batch, Plan
from datasets.stores.files import FileStore

CPUS = 0.5  # per worker of images: the workers of training and of evaluation do not work at the same time
_MISSING = "all nodes of the Ray cluster need the images at the same path as this one"


class RayWorkers:
    """Actors with the methods of engines/workers.py, which start at the first batch. The arguments are those
    of Pool."""

    def __init__(self, workers: int, address: str = "auto", cpus: float = 1.0):
        self._arguments = workers, address, cpus
        self._pool: Pool | None = None

    def load(self, plan: Plan, function: Callable[[Batch, int], Any]) -> Iterator[tuple[Batch, Any]]:
        """Yield (batch, function(batch, plan.size)) for each batch of a plan. Raises BadInput.

        The first call sends the function to the actors, and later calls must have the same.
        """
        if self._pool is None:
            self._pool = Pool(*self._arguments)
            self._function = self._pool.put(functools.partial(_run, function))
        tasks = enumerate((batch, plan.size) for batch in plan)
        try:
            for (_, (batch, _)), result in self._pool.map(self._function, tasks):
                yield batch, result
        except BadInput as error:
            if "No such file" in str(error):
                raise BadInput(f"{error}; {_MISSING}") from error
            raise

    def close(self) -> None:
        """End the actors."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None


def _run(function: Callable[[Batch, int], Any], task: tuple[int, tuple[Batch, int]]) -> Any:
    return function(*task[1])


class FolderCutter:
    """The function of workers that decode, crop and resize images, which they must be able to read."""

    def __init__(self, store: Any, antialias: bool | str = True):
        self.store, self.antialias = store, antialias
        if type(store) is FileStore and type(store.index) is ImageFolderIndex:
            self.store = copy.copy(store)
            self.store.index = _Columns(store.index)

    def __call__(self, batch: Batch, size: int) -> np.ndarray:
        images = np.empty((len(batch.ids), size, size, 3), np.uint8)
        heights, contents = self.store.index.heights, self.store.read(batch.ids)
        rows = zip(batch.ids.tolist(), *map(np.ndarray.tolist, batch.crops), strict=True)
        for image, content, (id, *box, flip) in zip(images, contents, rows, strict=True):
            pixels = self.store.crop(id, content, int(heights[id]), tuple(box))
            fit(pixels, flip, image, self.antialias)
        return images


class _Columns(ImageFolderIndex):
    """An index that is pickled with its arrays, so the workers do not need its folder."""

    def __init__(self, index: ImageFolderIndex):
        for name, value in vars(index).items():
            setattr(self, name, np.array(value) if isinstance(value, np.ndarray) else value)

    def __reduce__(self) -> tuple:
        return object.__new__, (_Columns,), vars(self)


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
    engine = MapStyle(RayWorkers(workers, address), fetcher)
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
    engine = WorkerEngine(RayWorkers(workers, address), Memory(data, augment))
    return Loader(engine, plan_of(data, sampler, augment), device, data.mean, data.std)
