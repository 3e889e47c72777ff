"""The crops and flips of images in memory: windows of one size. augment.py has those of folders of images."""

from typing import Any, NamedTuple

import numpy as np

from bootfile.sampling.philox import Operation, below, draw


class CropFlip(NamedTuple):
    """The corner of the window in the padded image (int64 [n]), and whether it is mirrored."""

    top: np.ndarray
    left: np.ndarray
    flip: np.ndarray  # bool [n]


def crop_flip(index: Any, ids: np.ndarray, seed: int, epoch: int) -> CropFlip:
    """Return windows uniform over (2 * padding + 1)^2 places, mirrored with probability 1/2. index: an
    ImageSet, whose `padding` (pixels) and `flip` (false: never mirror) apply. These are the crops and flips
    that are usual for CIFAR (He et al. 2015, section 4.2)."""
    words = draw(seed, epoch, ids, Operation.CROP_FLIP)
    mirrored = words[2] >= 2**31 if index.flip else np.zeros(len(words[2]), dtype=bool)
    places = 2 * index.padding + 1
    return CropFlip(below(words[0], places), below(words[1], places), mirrored)
