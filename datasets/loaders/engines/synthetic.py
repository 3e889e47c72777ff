"""An engine without data, to measure the maximum speed of a training."""

import numpy as np
import torch

from bootfile.loaders.loader import Data, Engine
from bootfile.sampling.plan import Plan


class SyntheticIndex:
    """The index of a data set without files: `count` images of 500x375 pixels."""

    unit = "images", 1  # as that of ImageFolderIndex

    def __init__(self, count: int, split: str, classes: int = 1000):
        self.classes = tuple(map(str, range(classes)))
        self.labels = np.arange(count) % classes
        self.widths = np.full(count, 500)
        self.heights = np.full(count, 375)
        self.split = split
        self.root = "synthetic"
        self.source = "synthetic"
        self.fingerprint = "synthetic"

    def __len__(self) -> int:
        return len(self.labels)


class Synthetic(Engine):
    """An engine for Loader: the plan's ids and labels, and always the same random images on the device.

    Its batches have no boxes, so its receipt differs from that of real data.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._images: torch.Tensor | None = None  # a batch of them, kept from epoch to epoch

    def run(self, plan: Plan) -> Data:
        """Yield the batches of an epoch, each with the first of the same images."""
        # again only if the image size of the epoch has changed
        shape = (plan.largest, plan.size, plan.size, 3)
        if self._images is None or self._images.shape != shape:
            generator = torch.Generator().manual_seed(0)
            images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            self._images = images.to(self.device)
        for batch in plan:
            yield batch._replace(crops=()), self._images[: len(batch.ids)]

    def close(self) -> None:
        """Free the images. The loader calls it at the end of the job."""
        self._images = None
