"""How a sample is varied: parameters as a pure function of (seed, epoch, sample id).

No engine draws random numbers of its own. It receives these, so the same crop is cut by every engine, at any
world size and after any restart.
"""

from typing import NamedTuple

import numpy as np
import torch

from datasets.philox import Operation, below, draw


class CropFlip(NamedTuple):
    """One row a sample: the corner of the window in the padded image (int64 [n]) and whether it is
    mirrored."""

    top: np.ndarray
    left: np.ndarray
    flip: np.ndarray  # bool [n]


def crop_flip(seed: int, epoch: int, ids, padding: int, flip: bool) -> CropFlip:
    """Windows uniform over the (2 * padding + 1)^2 places, mirrored with probability 1/2 where `flip` allows
    it.

    ids: integers [n]. The crop and the flip that are usual for CIFAR (He et al. 2015, section 4.2).
    """
    words = draw(seed, epoch, ids, Operation.CROP_FLIP)
    mirrored = words[2] >= 2**31 if flip else np.zeros(len(words[2]), dtype=bool)
    return CropFlip(below(words[0], 2 * padding + 1), below(words[1], 2 * padding + 1), mirrored)


def apply_crop_flip(images: torch.Tensor, parameters: CropFlip, padding: int) -> torch.Tensor:
    """Pad with black and cut. images: uint8 [n, C, H, W] on any device; returns a new tensor of the same
    shape."""
    height, width = images.shape[2:]
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    top, left, flip = (torch.from_numpy(column).to(images.device) for column in parameters)
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(len(images), width)
    columns = left[:, None] + torch.where(flip[:, None], width - 1 - columns, columns)
    sample = torch.arange(len(images), device=images.device)[:, None, None]
    cut = padded.permute(0, 2, 3, 1)[sample, rows[:, :, None], columns[:, None, :]]
    return cut.permute(0, 3, 1, 2)
