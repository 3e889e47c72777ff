"""Resize and mirror the box of an image."""

import warnings

import numpy as np
import torch

from bootfile.ground.errors import import_optional

cv2 = import_optional("cv2", "images need OpenCV", "opencv-python-headless")

_OPENCV = {1: 1, 2: 0, 3: -1}  # Crop.flip -> cv2.flip's code
BILINEAR = "bilinear"
BICUBIC = "bicubic"
_ROUGH = 1.08  # up to this reduction no antialiasing: the error is below 2 / 255 on the sharpest photographs

cv2.setNumThreads(1)  # the callers use one thread per image

with warnings.catch_warnings():  # torch warns once about memory that it must not write to; nothing here does
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(bytes(1), np.uint8))


def fit(box: np.ndarray, flip: int, out: np.ndarray, interpolation: str = BILINEAR) -> None:
    """Write the pixels of a box into `out`, resized with antialiasing, as Pillow and torchvision do.

    box: uint8 [H, W, 3].
    flip: as in augment.Crop.
    out: uint8 [height, width, 3], contiguous.
    interpolation: BILINEAR or BICUBIC.
    """
    if interpolation == BICUBIC:
        box = resized(box, out.shape[0], out.shape[1], BICUBIC)
    smaller = max(box.shape[0] / out.shape[0], box.shape[1] / out.shape[1])
    if smaller > _ROUGH:
        box = resized(box, *out.shape[:2])
    cv2.resize(box, out.shape[1::-1], dst=out, interpolation=cv2.INTER_LINEAR)
    if flip:
        cv2.flip(out, _OPENCV[flip], dst=out)


def resized(image: np.ndarray, height: int, width: int, mode: str = BILINEAR) -> np.ndarray:
    """Resize with antialiasing, as Pillow does: uint8 [H, W, 3] -> uint8 [height, width, 3]."""
    rows, columns, _ = image.shape
    source = torch.from_numpy(image)
    # channels_last with the stride of a batch: otherwise torch copies twice, and takes three times as long
    strides = rows * source.stride(0), 1, source.stride(0), 3
    source = source.as_strided((1, 3, rows, columns), strides)
    small = torch.nn.functional.interpolate(source, (height, width), mode=mode, antialias=True)
    return small[0].permute(1, 2, 0).contiguous().numpy()
