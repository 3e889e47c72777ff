"""Engines for a data set in memory, of the host or of the device. They gather whole batches, without items,
collation or workers."""

import functools
import itertools
from typing import Any

import numpy as np
import torch

from bootfile.ground import accelerator
from bootfile.ground.errors import import_optional
from bootfile.loaders.loader import Data, Engine, Loader
from bootfile.sampling.plan import Batch, Plan
from datasets.loaders.image_loader import ImageLoader
from datasets.memory.image_set import ImageSet
from datasets.sampling.windows import CropFlip, crop_flip

cv2 = import_optional("cv2", "images need OpenCV", "opencv-python-headless")

_CHUNK = 4096  # images gathered at a time (at least a batch), for fewer copies and kernels


def make_loader(
    data: Any, sampler: Any, device: torch.device, augment: bool = False, workers: Any = None
) -> Loader:
    """Return a loader of an ImageSet, or of any map-style Dataset (map_style.py).

    sampler: of datasets/sampling. augment: random crops and flips; other data sets transform their items
    themselves. workers: a Workers or RayWorkers that makes the batches, with the same data; default: this
    process, which is faster for images in memory.
    """
    if not isinstance(data, ImageSet):
        from bootfile.loaders.map_style import map_style_loader

        return map_style_loader(data, sampler, device, workers=workers or 0)
    engine: Any = Memory(data, augment)
    if workers:
        from bootfile.loaders.workers import WorkerEngine  # most jobs have none

        engine = WorkerEngine(workers, engine)
    return ImageLoader(engine, plan_of(data, sampler, augment), device, data.mean, data.std)


def plan_of(data: ImageSet, sampler: Any, augment: bool) -> Plan:
    """Return the plan of an ImageSet, with or without random crops and flips."""
    return Plan(data, sampler, crop_flip if augment else None)


def corners(batch: Batch) -> CropFlip:
    """Return the windows of a batch; without augmentation they show the whole images."""
    if batch.crops:
        return CropFlip(*batch.crops)
    corner = np.zeros(len(batch.ids), np.int64)
    return CropFlip(corner, corner, corner > 0)


class Memory(Engine):
    """An engine that crops images in host memory, and the function of workers that do. augment: whether the
    plan's crops need the padding of the data set."""

    def __init__(self, data: ImageSet, augment: bool):
        self._images = data.images
        self._padding = data.padding if augment else 0
        self._reflect = data.reflect

    @functools.cached_property
    def _windows(self) -> "Windows":
        """The padded images. They are made where they are used, and workers get only the images."""
        return Windows(self._images, self._padding, self._reflect)

    def __call__(self, batch: Batch) -> np.ndarray:
        """Return the images of a batch, uint8 [n, H, W, C]."""
        return self._windows(batch.ids, corners(batch))

    def run(self, plan: Plan) -> Data:
        """Yield the batches of an epoch with their images, made in this process."""
        for batch in plan:
            yield batch, torch.from_numpy(self(batch))


def pad(images: torch.Tensor, padding: int, reflect: bool, device: torch.device) -> torch.Tensor:
    """Return the images with `padding` pixels around them, uint8 [N, H + 2 padding, W + 2 padding, C].

    images: uint8 [N, C, H, W]. reflect: the padding mirrors the image without repeating its border; false:
    it is black.
    """
    count, channels, height, width = images.shape
    shape = (count, height + 2 * padding, width + 2 * padding, channels)
    # filled on the device, so the host needs no memory for the padded images
    padded = torch.zeros(shape, dtype=torch.uint8, device=device)
    bottom = padding + height - 1  # the image's last row
    right = padding + width - 1
    padded[:, padding : bottom + 1, padding : right + 1] = images.to(device).permute(0, 2, 3, 1)
    distances = range(1, padding + 1) if reflect else ()
    for distance in distances:
        padded[:, padding - distance] = padded[:, padding + distance]
        padded[:, bottom + distance] = padded[:, bottom - distance]
    for distance in distances:  # columns after rows: the corners too
        padded[:, :, padding - distance] = padded[:, :, padding + distance]
        padded[:, :, right + distance] = padded[:, :, right - distance]
    return padded


class Windows:
    """Padded images, from which windows are cut. images, padding, reflect: as for pad(), on the host. It
    needs memory for the padded images."""

    def __init__(self, images: torch.Tensor, padding: int, reflect: bool = False):
        count, channels, height, width = images.shape
        self._channels = channels
        padded = pad(images, padding, reflect, torch.device("cpu")).numpy()
        lines = padded.reshape(count, height + 2 * padding, -1)
        self._windows = np.lib.stride_tricks.sliding_window_view(
            lines, (height, width * channels), axis=(1, 2)
        )

    def __call__(self, ids: np.ndarray, crops: CropFlip) -> np.ndarray:
        """Return the windows, uint8 [n, H, W, C]. ids: integers [n] below N."""
        cut = self._windows[ids, crops.top, crops.left * self._channels]
        cut = cut.reshape(*cut.shape[:2], -1, self._channels)
        mirrored = np.flatnonzero(crops.flip)
        if len(mirrored):
            # one call for all: the images stand below each other
            lines = cut[mirrored].reshape(-1, *cut.shape[2:])
            cut[mirrored] = cv2.flip(lines, 1).reshape(len(mirrored), *cut.shape[1:])
        return cut


def resident_loader(data: ImageSet, sampler: Any, device: torch.device, augment: bool = False) -> Loader:
    """Return a loader whose images stay on the device: the same batches as make_loader(), bit for bit. It
    needs memory for the padded uint8 images: 240 MB for CIFAR-10. On the CPU it returns make_loader()."""
    if device.type == "cpu":
        return make_loader(data, sampler, device, augment)
    plan = plan_of(data, sampler, augment)
    return ImageLoader(Resident(data, augment, device), plan, device, data.mean, data.std)


class Resident(Engine):
    """An engine that gathers batches from images on `device`, padded by memory.pad() if the plan has crops
    (augment). height, width: of a window. stride, image: pixels of a row and of an image of the padded data
    set. pixels: all of them, uint8 [N * image, C]. rows, columns: the positions in a window."""

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
        """Return uint8 [n, H, W, C] on the device. windows: id, top, left, flip, int64 [4, n]. It starts a
        copy and kernels, and does not wait."""
        # four numbers for each image are all that goes to the device in a step
        columns = torch.from_numpy(windows)
        if accelerator.has_streams(self.pixels.device):
            columns = columns.pin_memory()
        ids, top, left, flip = columns.to(self.pixels.device, non_blocking=True)
        corner = (ids * self.image + top * self.stride + left).view(-1, 1, 1)
        across = torch.where(flip.view(-1, 1, 1) > 0, self.width - 1 - self.columns, self.columns)
        places = corner + self.rows * self.stride + across
        return self.pixels.index_select(0, places.view(-1)).view(*places.shape, -1)
