"""Workers that are actors of Ray: they get ids and boxes, and return images or items.

A task contains all parameters, and workers draw no other random numbers. So the cluster changes no data.
"""

import copy
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from bootfile.loaders.workers import Workers
from bootfile.sampling.plan import Batch
from datasets.folders.image_index import ImageFolderIndex
from datasets.folders.resize import BILINEAR
from datasets.loaders.engines.crops import Crops
from datasets.loaders.ray.data_loader import RayDataLoader
from datasets.stores.files import FileStore

CPUS = 0.5  # per worker of images: the workers of training and of evaluation do not work at the same time


class RayWorkers(Workers):
    """Workers that are actors of Ray, which start at the first batch. The arguments are those of Pool."""

    def __init__(self, workers: int, address: str = "auto", cpus: float = 1.0):
        super().__init__(workers, pinned=False)
        self.forks = False
        self._place: dict[str, Any] = {"head_address": address, "cpus_per_worker": cpus}

    def open_loader(self, results: Dataset, **options: Any) -> DataLoader:
        """Return the loader that Workers iterates. Workers calls it at the first batch."""
        return RayDataLoader(results, True, **self._place, **options)


class RemoteCrops(Crops):
    """Crops for workers that must be able to read the files, and that get the index with the function."""

    def __init__(self, store: Any, interpolation: str = BILINEAR):
        if type(store) is FileStore and type(store.index) is ImageFolderIndex:
            store = copy.copy(store)
            store.index = _Columns(store.index)
        super().__init__(store, interpolation)

    def __call__(self, batch: Batch) -> Any:
        """Return the images of a batch. An actor calls it, on any node."""
        return super().__call__(batch).numpy()  # Ray shares the memory of arrays, not of tensors


class _Columns(ImageFolderIndex):
    """An index that is pickled with its arrays, so the workers do not need its folder."""

    def __init__(self, index: ImageFolderIndex):
        for name, value in vars(index).items():
            setattr(self, name, np.array(value) if isinstance(value, np.ndarray) else value)

    def __reduce__(self) -> tuple:
        return object.__new__, (_Columns,), vars(self)
