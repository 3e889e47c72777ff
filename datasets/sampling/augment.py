"""Augmentation parameters as a pure function of (seed, epoch, sample id, size of the image).

Engines draw no random numbers. They receive these parameters, so every engine cuts the same crop, at any
world size and after any restart. Plan takes one of these functions as `augment`: it receives (index, ids
int64 [n], seed, epoch) and returns one row per id. epoch: a number, or one for each id if samples are drawn
with weights (BatchSampler.draws).
"""

import math
from typing import Any, NamedTuple

import numpy as np

from bootfile.sampling.philox import Operation, below, draw, uniform
from datasets.sampling.windows import CropFlip, crop_flip

_RATIO = 3 / 4, 4 / 3  # width / height of a box
_ATTEMPTS = 10  # to find a box that fits; two from each block of random words


def alternating_flip(index: Any, ids: np.ndarray, seed: int, epoch: int) -> CropFlip:
    """Return the windows of crop_flip(), mirrored in every second epoch: at random in the odd or even ones.
    So two consecutive epochs show both mirror images of every sample. Source: K. Jordan, "94% on CIFAR-10 in
    3.29 Seconds on a Single GPU", arXiv:2404.00498."""
    crops = crop_flip(index, ids, seed, epoch)
    if not index.flip:
        return crops
    begins_with_odd = draw(seed, 0, ids, Operation.CROP_FLIP)[2] >= 2**31  # epochs count from 1
    return crops._replace(flip=begins_with_odd == (epoch % 2 == 1))


class Crop(NamedTuple):
    """A box in the image, in pixels (int64 [n]), and whether its content is mirrored. flip: bool [n],
    mirrored left to right; or integers [n], 1 for left to right plus 2 for top to bottom."""

    top: np.ndarray
    left: np.ndarray
    height: np.ndarray
    width: np.ndarray
    flip: np.ndarray


def random_resized_crop(
    index: Any,
    ids: np.ndarray,
    seed: int,
    epoch: int | np.ndarray,
    scale: tuple[float, float] = (0.08, 1.0),
) -> Crop:
    """Return boxes of a random share of the area and a random aspect ratio, mirrored with probability 1/2.

    index: has `widths` and `heights` (pixels, by id). scale: share of the area, uniform. Width / height
    is in _RATIO, uniform in its logarithm. The distribution is that of torchvision's RandomResizedCrop: ten
    attempts, then the largest centred box whose ratio is allowed. Source: C. Szegedy et al., "Going
    Deeper with Convolutions", CVPR 2015, section 6. Plan calls it for each batch, some batches before the
    batch is used.
    """
    widths, heights = _sizes(index, ids)
    # the largest boxes whose ratio is allowed: for images without an attempt that fits
    is_narrow = widths < heights * _RATIO[0]
    is_wide = widths > heights * _RATIO[1]
    height = np.maximum(np.where(is_narrow, np.rint(widths / _RATIO[0]).astype(np.int64), heights), 1)
    width = np.maximum(np.where(is_wide, np.rint(heights * _RATIO[1]).astype(np.int64), widths), 1)
    epoch = np.broadcast_to(epoch, len(ids))
    first = draw(seed, epoch, ids, Operation.RESIZED_CROP)  # words of the place and the mirroring
    left = np.where(width < widths, (widths - width) // 2, 0)
    top = np.where(height < heights, (heights - height) // 2, 0)
    without_box = np.arange(len(ids))  # rows without a box so far
    # all images at once: those that have a box leave, the others try again
    for attempt in range(_ATTEMPTS):
        if not len(without_box):
            break
        # a block of random words is enough for two attempts
        if attempt % 2 == 0:
            rows = (epoch[without_box], ids[without_box])
            words = draw(seed, *rows, Operation.RESIZED_CROP, block=1 + attempt // 2)
        area = widths[without_box] * heights[without_box] * uniform(words[0], *scale)
        aspect = np.exp(uniform(words[1], math.log(_RATIO[0]), math.log(_RATIO[1])))
        wide = np.rint(np.sqrt(area * aspect)).astype(np.int64)
        high = np.rint(np.sqrt(area / aspect)).astype(np.int64)
        fits = (wide > 0) & (high > 0) & (wide <= widths[without_box]) & (high <= heights[without_box])
        done = without_box[fits]
        width[done] = wide[fits]
        height[done] = high[fits]
        left[done] = below(first[0][done], widths[done] - wide[fits] + 1)
        top[done] = below(first[1][done], heights[done] - high[fits] + 1)
        without_box = without_box[~fits]
        words = words[2:, ~fits]
    return Crop(top, left, height, width, first[2] >= 2**31)


def center_crop(index: Any, ids: np.ndarray, seed: int, epoch: int, share: float = 224 / 256) -> Crop:
    """Return the centred squares whose side is this share of the image's short side, for evaluation. index:
    as for random_resized_crop(). The share 224 / 256, scaled to 224 pixels, shows the same as Resize(256) and
    CenterCrop(224). seed and epoch are not used."""
    widths, heights = _sizes(index, ids)
    side = np.maximum(np.rint(np.minimum(widths, heights) * share).astype(np.int64), 1)
    left = (widths - side) // 2
    top = (heights - side) // 2
    return Crop(top, left, side, side, np.zeros(len(side), dtype=bool))


def square_crop(index: Any, ids: np.ndarray, seed: int, epoch: int, side: int) -> Crop:
    """Return squares of `side` pixels anywhere, mirrored in either direction with probability 1/2 each.
    index: as for random_resized_crop(), with sides of at least `side` pixels. All views of a sample
    (bootfile/sampling/sampler.py) get the same square. Crop.flip is uint8 in 0..3."""
    widths, heights = _sizes(index, ids)
    # the views of a sample differ by len(index): the remainder gives all of them the same words
    words = draw(seed, epoch, ids % len(index), Operation.SQUARE_CROP)
    size = np.full(len(words[0]), side, dtype=np.int64)
    top = below(words[0], heights - side + 1)
    left = below(words[1], widths - side + 1)
    flip = (words[2] >= 2**31).astype(np.uint8) + 2 * (words[3] >= 2**31).astype(np.uint8)
    return Crop(top, left, size, size, flip)


def center_square(index: Any, ids: np.ndarray, seed: int, epoch: int, side: int) -> Crop:
    """Return the squares of `side` pixels in the middle. seed and epoch are not used."""
    widths, heights = _sizes(index, ids)
    size = np.full(len(ids), side, dtype=np.int64)
    return Crop((heights - side) // 2, (widths - side) // 2, size, size, np.zeros(len(ids), dtype=np.uint8))


def _sizes(index: Any, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (widths, heights), int64 [n] each."""
    return index.widths[ids].astype(np.int64), index.heights[ids].astype(np.int64)
