"""A box of an image, resized and mirrored: the pixels behind datasets/sampling/augment.py's parameters."""

import numpy as np
import torch

from common.exits import import_optional

cv2 = import_optional("cv2", "images need OpenCV", "opencv-python-headless")

_OPENCV = {1: 1, 2: 0, 3: -1}  # Crop.flip -> cv2.flip's code
_ROUGH = 1.08  # up to so much smaller the nearest four pixels do: below 2 / 255 on the sharpest photographs

cv2.setNumThreads(1)  # its callers have threads of their own, one an image


def cut(
    image: np.ndarray,
    top: int,
    left: int,
    height: int,
    width: int,
    flip: int,
    out: np.ndarray,
    scale: float = 1.0,
    antialias: bool = True,
) -> None:
    """Put the box of the image into `out`, bilinearly resized.

    image: uint8 [H, W, 3]; out: uint8 [height, width, 3], contiguous. flip: as in augment.Crop. scale:
    of the image against the one for which the box was planned. antialias: average over what becomes one
    pixel, as Pillow and torchvision do; without it the nearest four pixels count, at half the cost.
    """
    if scale != 1.0:
        top, left, height, width = scaled(top, left, height, width, scale, *image.shape[:2])
    box = image[top : top + height, left : left + width]
    smaller = max(height / out.shape[0], width / out.shape[1])
    if antialias and smaller > _ROUGH:
        box = resized(box, *out.shape[:2])
    size = out.shape[1::-1]
    if flip:
        cv2.flip(cv2.resize(box, size, interpolation=cv2.INTER_LINEAR), _OPENCV[flip], dst=out)
    else:
        cv2.resize(box, size, dst=out, interpolation=cv2.INTER_LINEAR)


def scaled(
    top: int, left: int, height: int, width: int, scale: float, rows: int, columns: int
) -> tuple[int, int, int, int]:
    """The box in an image that was scaled and now has so many rows and columns."""
    top, left = min(round(top * scale), rows - 1), min(round(left * scale), columns - 1)
    height, width = max(round(height * scale), 1), max(round(width * scale), 1)
    return top, left, min(height, rows - top), min(width, columns - left)


def resized(image: np.ndarray, height: int, width: int, mode: str = "bilinear") -> np.ndarray:
    """With antialiasing, as Pillow does it: uint8 [H, W, 3] -> uint8 [height, width, 3]."""
    source = torch.from_numpy(image.copy()).permute(2, 0, 1)[None]  # torch takes no read-only memory
    small = torch.nn.functional.interpolate(source, (height, width), mode=mode, antialias=True)
    return small[0].permute(1, 2, 0).contiguous().numpy()
