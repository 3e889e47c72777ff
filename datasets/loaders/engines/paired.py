"""Pairs of images as batches in [-1, 1], by threads that decode, resize and cut them: the plain way."""

import numpy as np
import torch

from datasets.folders.cut import resized
from datasets.loaders.engines.threads import Threads
from datasets.loaders.loader import FolderLoader
from datasets.stores.files import FileStore

_HALF = (0.5, 0.5, 0.5)  # mean and deviation that make 0..255 -1..1


class PairStore(FileStore):
    """The images of a paired_images.PairIndex, with the rows that it was asked for."""

    def image(self, id: int, scratch: np.ndarray | None = None) -> np.ndarray:
        image = super().image(id, scratch)
        height, width = int(self.index.heights[id]), int(self.index.widths[id])
        return image if image.shape[:2] == (height, width) else resized(image, height, width)


class PairedThreads(Threads):
    """An engine for PairLoader. index: a paired_images.PairIndex. workers: threads. device: where the batches
    go."""

    def __init__(self, index, workers: int, device: torch.device):
        super().__init__(PairStore(index), workers, pinned=device.type == "cuda")


class PairLoader(FolderLoader):
    """Iterates (blurry, sharp): float [n, 3, crop, crop], RGB, pixel / 127.5 - 1, on `device`.

    engine: PairedThreads, or another engine for FolderLoader. plan: a PairPlan. The last batch of an epoch is
    smaller, and may be empty in one of several processes. `receipt` covers both images of every pair.
    """

    def __init__(self, engine, plan, device: torch.device):
        super().__init__(engine, plan, device, _HALF, _HALF)

    def __iter__(self):
        for images, _ in super().__iter__():
            yield images.tensor_split(2)
