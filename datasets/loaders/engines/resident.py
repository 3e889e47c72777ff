"""An engine for a data set in the device's memory: a step copies only ids, crop corners and labels."""

import itertools
from typing import Any

import numpy as np
import torch

from bootfile.ground import accelerator
from bootfile.loaders.loader import Data, Engine, Loader
from bootfile.sampling.plan import Plan
from datasets.loaders.engines.memory import corners, make_loader, pad, plan_of
from datasets.loaders.image_loader import ImageLoader
from datasets.memory.image_set import ImageSet

_CHUNK = 4096  # images gathered at a time (at least a batch), for fewer copies and kernels


def resident_loader(data: ImageSet, sampler: Any, device: torch.device, augment: bool = False) -> Loader:
    """Return a loader whose images stay on the device: the same batches as make_loader(), bit for bit.

    It needs memory for the padded uint8 images: 240 MB for CIFAR-10. On the CPU it returns make_loader().
    """
    if device.type == "cpu":
        return make_loader(data, sampler, device, augment)
    plan = plan_of(data, sampler, augment)
    return ImageLoader(Resident(data, augment, device), plan, device, data.mean, data.std)


class Resident(Engine):
    """An engine that gathers batches from images on `device`, padded by memory.pad() if the plan has crops
    (augment).

    height, width: of a window. stride, image: pixels of a row and of an image of the padded data set.
    pixels: all of them, uint8 [N * image, C]. rows, columns: the positions in a window.
    """

    def __init__(self, data: ImageSet, augment: bool, device: torch.device):
        padding = data.padding if augment else 0
        _, channels, self.height, self.width = data.images.shape
        self.stride = self.width + 2 * padding
        padded = pad(data.images, padding, data.reflect, device)
        self.image = padded.shape[1] * padded.shape[2]  # pixels
        self.pixels = padded.view(-1, channels)
        self.rows = torch.arange(self.height, device=device).view(1, -1, 1)
        self.columns = torch.arange(self.width, device=device).view(1, 1, -1)

    def run(self, plan: Plan) -> Data:
        """Yield the batches of an epoch with their images. Several batches are gathered at once."""
        batches = iter(plan)
        while True:
            several = list(itertools.islice(batches, max(1, _CHUNK // plan.largest)))
            if not several:
                return
            columns = [np.stack([batch.ids, *corners(batch)]) for batch in several]
            images = self.gather(np.concatenate(columns, axis=1))
            yield from zip(several, images.split([len(batch.ids) for batch in several]), strict=True)

    def gather(self, windows: np.ndarray) -> torch.Tensor:
        """Return uint8 [n, H, W, C] on the device. windows: id, top, left, flip, int64 [4, n].

        run() calls it in the process of the training. It starts a copy and kernels, and does not wait."""
        # four numbers for each image are all that goes to the device in a step
        columns = torch.from_numpy(windows)
        if accelerator.has_streams(self.pixels.device):
            columns = columns.pin_memory()
        ids, top, left, flip = columns.to(self.pixels.device, non_blocking=True)
        corner = (ids * self.image + top * self.stride + left).view(-1, 1, 1)
        across = torch.where(flip.view(-1, 1, 1) > 0, self.width - 1 - self.columns, self.columns)
        places = corner + self.rows * self.stride + across
        return self.pixels.index_select(0, places.view(-1)).view(*places.shape, -1)
