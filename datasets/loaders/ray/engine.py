"""An engine on the nodes of a Ray cluster: it sends ids and boxes, and receives uint8 images.

A task contains all parameters, and workers draw no random numbers. So images do not depend on the cluster.
"""

import collections
import copy
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import torch

from common.exits import BadInput
from datasets.folders.image_folder import ImageFolderIndex
from datasets.folders.resize import fit
from datasets.loaders.engines.map_style import Fetcher, build_loader
from datasets.loaders.engines.memory import Windows, corners, plan_of
from datasets.loaders.loader import Loader
from datasets.loaders.ray.pool import Pool
from datasets.memory.image_set import ImageSet
from datasets.sampling import generators
from datasets.sampling.sampler import Batch, Plan, rows
from datasets.stores.files import FileStore

_CPUS = 0.5  # per worker: the workers of training and of evaluation do not run at the same time
_ROWS = 64  # images per task: a larger batch is divided among the workers
_AHEAD = 2  # running tasks per worker while one batch is used
_MISSING = "all nodes of the Ray cluster need the images at the same path as this one"


class RayEngine:
    """An engine for Loader.

    cutter: a function for Pool that makes images. If it has a method join(batch, parts), this process calls
        it to make a batch of the results.
    The other arguments are those of Pool.
    """

    reuses_memory = False

    def __init__(
        self,
        cutter: Any,
        workers: int,
        cpus: float = _CPUS,
        address: str = "auto",
        log: Callable[[str], None] | None = None,
    ):
        self._workers, self._join = workers, getattr(cutter, "join", _join_images)
        if hasattr(cutter, "example"):
            self.example = cutter.example
        self._pool = Pool(cutter, workers, address, cpus, log)

    def run(self, plan: Plan) -> Generator[tuple[Batch, Any], None, None]:
        """Yield each batch with its images, uint8 [n, H, W, C], or the results of join(). Raises BadInput."""
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
            for first in results:
                batch, count = batches.popleft()
                yield self._join(batch, [first, *itertools.islice(results, count - 1)])
        except BadInput as error:
            raise BadInput(f"{error}; {_MISSING}" if "No such file" in str(error) else str(error)) from error
        finally:
            results.close()

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


def _join_images(batch: Batch, parts: list[np.ndarray]) -> tuple[Batch, torch.Tensor]:
    return batch, torch.from_numpy(np.concatenate(parts) if len(parts) > 1 else parts[0])


class FolderCutter:
    """A cutter that decodes, crops and resizes images. The workers must be able to read the store."""

    def __init__(self, store: Any, antialias: bool = True):
        self.store, self.antialias = store, antialias
        if type(store) is FileStore and type(store.index) is ImageFolderIndex:
            self.store = copy.copy(store)
            self.store.index = _Columns(store.index)

    def begin(self, worker: int, workers: int) -> None:
        """Let torch use one thread, because a worker has one CPU at most."""
        torch.set_num_threads(1)

    def __call__(self, task: tuple) -> np.ndarray:
        size, ids, crops = task
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

    def begin(self, worker: int, workers: int) -> None:
        """Pad the images."""
        images = torch.from_numpy(np.array(self.images))
        self._windows = Windows(images, self.padding, self.reflect)

    def __call__(self, task: tuple) -> np.ndarray:
        _, ids, crops = task
        return self._windows(ids, corners(Batch(ids, ids, crops)))


class ItemReader:
    """A cutter that reads items of any Dataset. The workers must be able to read its files."""

    def __init__(self, fetcher: Fetcher):
        self.fetcher = fetcher

    def begin(self, worker: int, workers: int) -> None:
        """Let torch use one thread: a worker has one CPU."""
        torch.set_num_threads(1)

    def __call__(self, task: tuple) -> list:
        _, ids, crops = task
        with generators.restored():  # in this process, if no worker is left
            return self.fetcher.items(ids, crops[0]) if len(ids) else []

    def join(self, batch: Batch, parts: list[list]) -> tuple[Batch, Any]:
        """Return (the batch with its labels, its (inputs, targets))."""
        items = [item for part in parts for item in part]
        with generators.restored():
            if not items:  # a rank's part of a last batch may be empty
                labels, data = self.fetcher.batch(batch.ids, batch.crops[0])
                return batch._replace(labels=labels), data
            labels, data = self.fetcher.collate(items, int(batch.crops[0][-1]))
        return batch._replace(labels=labels), data

    def example(self, count: int) -> Any:
        """Return the inputs of the first `count` samples."""
        return self.fetcher.example(count)


def ray_map_style_loader(
    dataset: Any,
    sampler: Any,
    device: torch.device,
    augment: bool = False,
    *,
    collate_fn: Callable[[list], Any] | None = None,
    workers: int = 2,
    address: str = "auto",
    log: Callable[[str], None] | None = None,
) -> Loader:
    """Return a map_style_loader() whose items are read by workers of a Ray cluster.

    augment: not used. workers, address, log: as in Pool. The dataset with its tensors is sent to the workers
    once.
    """
    fetcher = Fetcher(dataset, collate_fn)
    return build_loader(RayEngine(ItemReader(fetcher), workers, 1.0, address, log), fetcher, sampler, device)


def ray_memory_loader(
    data: ImageSet,
    sampler: Any,
    device: torch.device,
    augment: bool = False,
    workers: int = 2,
    address: str = "auto",
    log: Callable[[str], None] | None = None,
) -> Loader:
    """Return a make_loader() whose crops and flips are made by workers of a Ray cluster.

    workers, address, log: as in Pool. Images that fit in memory are cropped faster in this process. This
    loader shows the necessary change, and delivers the same data.
    """
    engine = RayEngine(WindowCutter(data, augment), workers, 1.0, address, log)
    return Loader(engine, plan_of(data, sampler, augment), device, data.mean, data.std)
