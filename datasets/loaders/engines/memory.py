"""Batches of a data set that fits in memory, gathered whole: no item-by-item fetch, no collation, no
worker."""

import itertools
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from datasets.loaders.device import ToDevice
from datasets.memory.image_set import ImageSet
from datasets.sampling.augment import CropFlip, Windows, crop_flip
from datasets.sampling.receipt import Receipt, batch_sums

_TOGETHER = 4096  # samples, at least a batch, planned at a time: NumPy's cost per call, spread over steps


class Batch(NamedTuple):
    """One batch before anything is cut. ids, labels: int64 [n]; sums: as a receipt records it, [1, 3]."""

    ids: np.ndarray
    labels: torch.Tensor
    parameters: CropFlip
    sums: np.ndarray


class MemoryLoader:
    """Iterates (images float32 [n, C, H, W] channels_last and normalised, labels int64 [n]) on `device`.

    order: a batch sampler of ids. augment: crop and flip by the seed and epoch of a BatchSampler. `len` is
    the number of batches of an epoch; `waited` the seconds that iterating has cost its caller so far;
    `receipt` says what was delivered.
    """

    def __init__(self, data: ImageSet, order, device: torch.device, augment: bool = False):
        self.data, self.order, self.augment = data, order, augment
        self.to_device = ToDevice(device, data.mean, data.std)
        self.waited, self.receipt = 0.0, Receipt(data.fingerprint)
        self._hold()

    def seek(self, step: int) -> None:
        """Set the position: the next batch is that of global step `step`, counted from 0."""
        self.order.seek(step)

    def epochs_from(self, step: int) -> Iterator[int]:
        """Yield the remaining epochs, each with the position set (BatchSampler.epochs_from)."""
        return self.order.epochs_from(step)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole training; None if it has no limit."""
        return self.order.total_steps

    def commit(self, step: int, folder: str) -> None:
        """Chain the receipt up to step `step`, on all ranks; rank 0 appends it to FOLDER/receipt.bin."""
        self.receipt.commit(step, len(self), folder, self.to_device.device)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self):
        start = time.perf_counter()
        for images, labels, sums in self._cut():
            self.receipt.record(sums)
            batch = self.to_device(images, labels)
            self.waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def _hold(self) -> None:
        """Lay the images out as batches are cut from them."""
        self._windows = Windows(self.data.images, self.data.padding if self.augment else 0)

    def _cut(self):
        """(images uint8 [n, C, H, W], labels, sums) of the rest of the epoch's batches."""
        for ids, labels, parameters, sums in self._planned():
            yield self._windows(ids, parameters), labels, sums

    def _planned(self) -> Iterator[Batch]:
        for several in self._together():
            ids = np.concatenate(several)
            parameters, labels = self._parameters(ids), self.data.labels[torch.from_numpy(ids)]
            ends = np.cumsum([len(each) for each in several])
            sums = batch_sums(ids, labels.numpy(), parameters if self.augment else (), ends)
            for number, last in enumerate(ends):
                place = slice(last - len(several[number]), last)
                cut = CropFlip(*(column[place] for column in parameters))
                yield Batch(ids[place], labels[place], cut, sums[number : number + 1])

    def _together(self) -> Iterator[list[np.ndarray]]:
        """The ids of the rest of the epoch's batches, several batches at a time."""
        batches = iter(self.order)
        while several := list(itertools.islice(batches, max(1, _TOGETHER // self.order.largest))):
            yield several

    def _parameters(self, ids: np.ndarray) -> CropFlip:
        if not self.augment:
            return CropFlip(*np.zeros((2, len(ids)), np.int64), np.zeros(len(ids), bool))
        order, data = self.order, self.data
        return crop_flip(order.seed, order.epoch, ids, data.padding, data.flip)
