"""Batches of a data set that fits in memory, gathered whole: no item-by-item fetch, no collation, no
worker."""

import itertools
import time

import numpy as np
import torch

from datasets.augment import CropFlip, Windows, crop_flip
from datasets.image_set import ImageSet
from datasets.loaders.device import ToDevice
from datasets.receipt import Receipt

_TOGETHER = 16  # batches whose crops are computed at a time: NumPy's cost per call, spread over several steps


class MemoryLoader:
    """Iterates (images float32 [n, C, H, W] channels_last and normalised, labels int64 [n]) on `device`.

    order: a batch sampler of ids. augment: crop and flip by order's seed and epoch (an Order). `len` is the
    number of batches of an epoch; `waited` the seconds that iterating has cost its caller so far; `receipt`
    says what was delivered.
    """

    def __init__(self, data: ImageSet, order, device: torch.device, augment: bool = False):
        self.data, self.order, self.augment = data, order, augment
        self._windows = Windows(data.images, data.padding if augment else 0)
        self.to_device = ToDevice(device, data.mean, data.std)
        self.waited, self.receipt = 0.0, Receipt()

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        self.order.set_epoch(epoch, start_step)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self):
        start = time.perf_counter()
        for ids, parameters in self._planned():
            labels = self.data.labels[torch.from_numpy(ids)]
            images = self._windows(ids, parameters)
            self.receipt.add(ids, labels, parameters if self.augment else ())
            batch = self.to_device(images, labels)
            self.waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def _planned(self):
        """(ids, CropFlip of them) of every batch."""
        batches = iter(self.order)
        while several := list(itertools.islice(batches, _TOGETHER)):
            ids = np.concatenate(several)
            whole = CropFlip(*np.zeros((2, len(ids)), np.int64), np.zeros(len(ids), bool))
            if self.augment:
                order, data = self.order, self.data
                whole = crop_flip(order.seed, order.epoch, ids, data.padding, data.flip)
            last = 0
            for part in several:
                first, last = last, last + len(part)
                yield part, CropFlip(*(column[first:last] for column in whole))
