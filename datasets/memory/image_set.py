"""Data sets in memory: the class, loading by name, and generated images."""

import functools
import hashlib
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bootfile.ground.errors import BadInput
from common.platform.signs import MEMBER

NAMES = ("cifar10", "digits", "fashion_mnist")  # modules of this folder, each with a function load()
# of generated sets
GENERATED_CLASSES = 10
GENERATED_TRAIN = 5000  # images
GENERATED_TEST = 100  # a smoke test evaluates all


@dataclass(frozen=True)
class ImageSet:
    """A data set of images in memory.

    images: uint8 [N, C, H, W].
    labels: int64 [N] in 0..classes-1.
    mean, std: per channel, of pixels / 255.
    padding, flip: random crops (in pixels) and mirroring that do not change the class.
    source: text for users about the origin of the images.
    class_names: by label, if the classes have names.
    reflect: the padding mirrors the image at its border instead of being black.
    """

    images: torch.Tensor
    labels: torch.Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int
    flip: bool
    source: str
    class_names: tuple[str, ...] = ()
    reflect: bool = False

    unit = "images", 1  # what a log counts per second, and how many an item has

    def __post_init__(self) -> None:
        has_means = all(0 <= mean <= 1 for mean in self.mean)
        has_deviations = all(0 < deviation <= 1 for deviation in self.std)
        if len(self.mean) != len(self.std) or not has_means or not has_deviations:
            raise BadInput(
                f"mean {[*self.mean]}, std {[*self.std]}: expected those of pixels / 255, for each channel: "
                "a mean in 0..1 and a standard deviation above 0 and at most 1"
            )
        if len(self.mean) != self.channels:
            raise BadInput(f"{self.source}: {len(self.mean)} means for images of {self.channels} channels")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(channels, height, width) of the images."""
        return tuple(self.images.shape[1:])

    @property
    def channels(self) -> int:
        """C of images."""
        return self.images.shape[1]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the images, the labels and how they are normalised and augmented, 32 hex digits.

        Each rank computes it once, at the start of a job: the receipt and the checkpoints have it."""
        images = self.images.contiguous().numpy()
        labels = self.labels.contiguous().numpy()
        digest = hashlib.sha256(images.data)
        digest.update(labels.data)
        facts = (images.shape, self.classes, self.mean, self.std, self.padding, self.flip)
        digest.update(repr(facts).encode())
        # only if it is set: the fingerprints of other sets stay those of earlier versions
        if self.reflect:
            digest.update(b"reflect")
        return digest.hexdigest()[:32]


def load(name: str, data_url: str | None, custom_data: bool) -> tuple[ImageSet, ImageSet]:
    """Return the training set and the test set of this name, one of NAMES.

    data_url: the folder or URL with its files; None: input_dir/, where CIFAR-10 is downloaded if it is
    missing. custom_data: generated images of the same form instead. A process that runs main() again, because
    others died, keeps the sets. Every rank calls it at the start of a job. Raises BadInput.
    """
    if MEMBER in os.environ:  # the launcher may run main() again in this process
        return _load_once(name, data_url, custom_data)
    return _load(name, data_url, custom_data)


def _load(name: str, data_url: str | None, custom_data: bool) -> tuple[ImageSet, ImageSet]:
    """Import the module of this name, and load its sets."""
    return importlib.import_module(f"datasets.memory.{name}").load(data_url, custom_data)


_load_once = functools.lru_cache(1)(_load)


def generate_sets(make: Callable[..., ImageSet], channels: int, side: int) -> tuple[ImageSet, ImageSet]:
    """Return a training and a test set of ten learnable classes for smoke tests, always the same.

    make: returns the set of (images uint8 [N, channels, side, side], labels int64 [N], source=text), N = 5000
    and 100. A class is a smooth random pattern under noise of the same contrast.
    """
    generator = torch.Generator().manual_seed(2024)
    coarse = torch.randn(GENERATED_CLASSES, channels, 4, 4, generator=generator)
    patterns = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear")

    def draw(count: int) -> ImageSet:
        """Return the next `count` images and their labels."""
        labels = torch.randperm(count, generator=generator) % GENERATED_CLASSES
        images = torch.randn(count, channels, side, side, generator=generator).mul_(40)
        images.add_((128 + 40 * patterns)[labels])
        return make(images.clamp_(0, 255).to(torch.uint8), labels, source="generated")

    return draw(GENERATED_TRAIN), draw(GENERATED_TEST)
