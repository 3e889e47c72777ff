"""Batches of a data set that stays in the device's memory: what travels per step is nothing.

The host computes which samples and which crops, some thousands at a time; the device holds the padded uint8
images, gathers whole batches by index, and adds up the receipt of what it gathered.
"""

import numpy as np
import torch

from datasets.loaders.engines.memory import MemoryLoader
from datasets.sampling.receipt import batch_sums


class ResidentLoader(MemoryLoader):
    """A MemoryLoader whose images are on the device: the same batches, bit for bit, and the same receipt.

    Its memory is that of the images, padded, in uint8: 240 MB for CIFAR-10. On the CPU the images are where
    they are needed already, and it is a MemoryLoader.
    """

    def _hold(self) -> None:
        if self.to_device.device.type == "cpu":
            super()._hold()
        else:
            padding = self.data.padding if self.augment else 0
            self._gather = Gather(self.data.images, self.data.labels, padding, self.to_device.device)

    def _cut(self):
        return super()._cut() if self.to_device.device.type == "cpu" else self._gathered()

    def _gathered(self):
        for several in self._together():
            sizes = [len(each) for each in several]
            ids = np.concatenate(several)
            images, labels, sums = self._gather(ids, self._parameters(ids), np.cumsum(sizes), self.augment)
            yield from zip(images.split(sizes), labels.split(sizes), sums.split(1), strict=True)


class Gather:
    """Images uint8 [N, C, H, W] and labels int64 [N], kept on `device` with `padding` black pixels around."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, padding: int, device: torch.device):
        count, channels, self.height, self.width = images.shape
        self.stride = self.width + 2 * padding
        # Filled on the device: the host never holds the padded images as well.
        padded = torch.zeros(
            (count, self.height + 2 * padding, self.stride, channels), dtype=torch.uint8, device=device
        )
        inside = slice(padding, padding + self.height), slice(padding, padding + self.width)
        padded[:, inside[0], inside[1]] = images.to(device).permute(0, 2, 3, 1)
        self.image = padded.shape[1] * padded.shape[2]  # pixels
        self.pixels, self.labels = padded.view(-1, channels), labels.to(device)
        self.rows = torch.arange(self.height, device=device).view(1, -1, 1)
        self.columns = torch.arange(self.width, device=device).view(1, 1, -1)

    def __call__(self, ids: np.ndarray, parameters, ends: np.ndarray, augmented: bool):
        """(images uint8 [n, C, H, W] channels_last, labels [n], sums int64 [batches, 3]), all on the device.

        ids: int64 [n]; parameters: CropFlip of them; ends: where each batch ends. augmented: whether the
        parameters belong into the receipt.
        """
        columns = np.stack([ids, *(column.astype(np.int64) for column in parameters)])
        columns = self._moved(torch.from_numpy(columns))
        ids, top, left, flip = columns
        labels = self.labels[ids]
        sums = batch_sums(ids, labels, (top, left, flip) if augmented else (), self._moved(ends))
        corner = (ids * self.image + top * self.stride + left).view(-1, 1, 1)
        across = torch.where(flip.view(-1, 1, 1) > 0, self.width - 1 - self.columns, self.columns)
        places = corner + self.rows * self.stride + across
        images = self.pixels.index_select(0, places.view(-1))
        return images.view(*places.shape, -1).permute(0, 3, 1, 2), labels, sums

    def _moved(self, numbers) -> torch.Tensor:
        numbers = torch.as_tensor(numbers)
        if self.labels.is_cuda:
            numbers = numbers.pin_memory()
        return numbers.to(self.labels.device, non_blocking=True)
