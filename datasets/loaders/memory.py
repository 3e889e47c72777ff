"""Batches of a data set that fits in memory, gathered whole: no item-by-item fetch, no collation, no
worker."""

import time

import torch

from datasets.augment import apply_crop_flip, crop_flip
from datasets.image_set import ImageSet
from datasets.loaders.device import ToDevice
from datasets.receipt import Receipt


class MemoryLoader:
    """Iterates (images float32 [n, C, H, W] channels_last and normalised, labels int64 [n]) on `device`.

    order: a batch sampler of ids. augment: crop and flip by order's seed and epoch (an Order). `len` is the
    number of batches of an epoch; `waited` the seconds that iterating has cost its caller so far; `receipt`
    says what was delivered.
    """

    def __init__(self, data: ImageSet, order, device: torch.device, augment: bool = False):
        self.data, self.order, self.augment = data, order, augment
        self.to_device = ToDevice(device, data.mean, data.std)
        self.waited, self.receipt = 0.0, Receipt()

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        self.order.set_epoch(epoch, start_step)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self):
        start = time.perf_counter()
        for ids in self.order:
            rows = torch.from_numpy(ids)
            images, labels = self.data.images[rows], self.data.labels[rows]
            parameters = ()
            if self.augment:
                parameters = crop_flip(
                    self.order.seed, self.order.epoch, ids, self.data.padding, self.data.flip
                )
                images = apply_crop_flip(images, parameters, self.data.padding)
            self.receipt.add(ids, labels, parameters)
            batch = self.to_device(images, labels)
            self.waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()
