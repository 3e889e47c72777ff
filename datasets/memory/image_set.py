"""A data set that fits in memory, as every in-memory source returns it."""

import functools
import hashlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ImageSet:
    """images: uint8 [N, C, H, W]; labels: int64 [N] in 0..classes-1; mean and std: per channel, of pixels /
    255.

    padding (pixels) and flip say which crops and mirror images still show the same class. source: where it
    came from. class_names: by label, if the classes have names.
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

    def __len__(self) -> int:
        return len(self.images)

    @property
    def channels(self) -> int:
        return self.images.shape[1]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the images, the labels and how they are normalised and augmented, 32 hex digits."""
        images, labels = (each.contiguous().numpy() for each in (self.images, self.labels))
        digest = hashlib.sha256(images.data)
        digest.update(labels.data)
        facts = (images.shape, self.classes, self.mean, self.std, self.padding, self.flip)
        digest.update(repr(facts).encode())
        return digest.hexdigest()[:32]
