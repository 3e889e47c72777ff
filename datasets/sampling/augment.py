"""How a sample is varied: parameters as a pure function of (seed, epoch, sample id, size of the image).

No engine draws random numbers of its own. It receives these, so the same crop is cut by every engine, at any
world size and after any restart.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from common.exits import import_optional
from datasets.sampling.philox import Operation, below, draw, uniform

cv2 = import_optional("cv2", "images need OpenCV", "opencv-python-headless")

_ATTEMPTS = 10  # to find a box that fits; two from each block of random words


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


class Windows:
    """Cuts the windows of crop_flip() out of a data set that is padded with black once, and kept so.

    images: uint8 [N, C, H, W] on the host. Its memory is that of the padded images.
    """

    def __init__(self, images: torch.Tensor, padding: int):
        count, channels, height, width = images.shape
        self._channels, side = channels, 2 * padding
        padded = np.zeros((count, height + side, width + side, channels), np.uint8)
        padded[:, padding : padding + height, padding : padding + width] = images.permute(0, 2, 3, 1).numpy()
        rows = padded.reshape(count, height + side, -1)
        self._windows = np.lib.stride_tricks.sliding_window_view(
            rows, (height, width * channels), axis=(1, 2)
        )

    def __call__(self, ids: np.ndarray, parameters: CropFlip) -> torch.Tensor:
        """uint8 [n, C, H, W], channels_last. ids: integers [n] below N."""
        cut = self._windows[ids, parameters.top, parameters.left * self._channels]
        cut = cut.reshape(*cut.shape[:2], -1, self._channels)
        mirrored = np.flatnonzero(parameters.flip)
        if len(mirrored):
            rows = cut[mirrored].reshape(-1, *cut.shape[2:])
            cut[mirrored] = cv2.flip(rows, 1).reshape(len(mirrored), *cut.shape[1:])
        return torch.from_numpy(cut).permute(0, 3, 1, 2)


class Crop(NamedTuple):
    """One row a sample: a box in the image, in pixels (int64 [n]), and whether what it shows is mirrored.

    flip: bool [n], left and right exchanged; or integers [n] that add 2 where top and bottom are, too.
    """

    top: np.ndarray
    left: np.ndarray
    height: np.ndarray
    width: np.ndarray
    flip: np.ndarray

    def part(self, first: int, last: int) -> "Crop":
        return Crop(*(column[first:last] for column in self))


def random_resized_crop(
    seed: int,
    epoch: int,
    ids,
    widths: np.ndarray,
    heights: np.ndarray,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Crop:
    """Boxes of a random share of the area and a random aspect ratio, mirrored with probability 1/2.

    ids, widths, heights (pixels): integers [n]. scale: share of the area, uniform; ratio: width / height,
    uniform in its logarithm. The distribution is that of torchvision's RandomResizedCrop: ten attempts, then
    the largest centred box whose ratio is allowed. Source: C. Szegedy et al., "Going Deeper with
    Convolutions", CVPR 2015, section 6.
    """
    ids = np.asarray(ids)
    widths, heights = np.asarray(widths).astype(np.int64), np.asarray(heights).astype(np.int64)
    width, height = _fallback(widths, heights, ratio)
    first = draw(seed, epoch, ids, Operation.RESIZED_CROP)
    left = np.where(width < widths, (widths - width) // 2, 0)
    top = np.where(height < heights, (heights - height) // 2, 0)
    open_ = np.arange(len(ids))  # rows without a box so far
    for attempt in range(_ATTEMPTS):
        if not len(open_):
            break
        if attempt % 2 == 0:
            words = draw(seed, epoch, ids[open_], Operation.RESIZED_CROP, block=1 + attempt // 2)
        area = widths[open_] * heights[open_] * uniform(words[0], *scale)
        aspect = np.exp(uniform(words[1], math.log(ratio[0]), math.log(ratio[1])))
        wide = np.rint(np.sqrt(area * aspect)).astype(np.int64)
        high = np.rint(np.sqrt(area / aspect)).astype(np.int64)
        fits = (wide > 0) & (high > 0) & (wide <= widths[open_]) & (high <= heights[open_])
        done = open_[fits]
        width[done], height[done] = wide[fits], high[fits]
        left[done] = below(first[0][done], widths[done] - wide[fits] + 1)
        top[done] = below(first[1][done], heights[done] - high[fits] + 1)
        open_, words = open_[~fits], words[2:, ~fits]
    return Crop(top, left, height, width, first[2] >= 2**31)


def _fallback(widths: np.ndarray, heights: np.ndarray, ratio: tuple[float, float]):
    narrow, wide = widths < heights * ratio[0], widths > heights * ratio[1]
    height = np.where(narrow, np.rint(widths / ratio[0]).astype(np.int64), heights)
    width = np.where(wide, np.rint(heights * ratio[1]).astype(np.int64), widths)
    return np.maximum(width, 1), np.maximum(height, 1)


def center_crop(widths: np.ndarray, heights: np.ndarray, share: float = 224 / 256) -> Crop:
    """The centred square whose side is this share of the image's short side, for evaluation.

    widths, heights: integers [n], pixels. Scaled to 224 pixels, what 224 / 256 leaves is what Resize(256) and
    CenterCrop(224) show.
    """
    widths, heights = np.asarray(widths).astype(np.int64), np.asarray(heights).astype(np.int64)
    side = np.maximum(np.rint(np.minimum(widths, heights) * share).astype(np.int64), 1)
    left, top = (widths - side) // 2, (heights - side) // 2
    return Crop(top, left, side, side, np.zeros(len(side), dtype=bool))


def square_crop(seed: int, epoch: int, ids, widths: np.ndarray, heights: np.ndarray, side: int) -> Crop:
    """Squares of `side` pixels anywhere in the image, mirrored in either direction with probability 1/2 each.

    ids, widths, heights (pixels, at least `side`): integers [n]. Crop.flip is uint8 in 0..3.
    """
    words = draw(seed, epoch, ids, Operation.SQUARE_CROP)
    size = np.full(len(words[0]), side, dtype=np.int64)
    top, left = below(words[0], heights - side + 1), below(words[1], widths - side + 1)
    flip = (words[2] >= 2**31).astype(np.uint8) + 2 * (words[3] >= 2**31).astype(np.uint8)
    return Crop(top, left, size, size, flip)


def center_square(widths: np.ndarray, heights: np.ndarray, side: int) -> Crop:
    """The squares of `side` pixels in the middle. widths, heights: as in square_crop()."""
    size = np.full(len(widths), side, dtype=np.int64)
    top, left = ((each.astype(np.int64) - side) // 2 for each in (heights, widths))
    return Crop(top, left, size, size, np.zeros(len(size), dtype=np.uint8))
