"""Folders of generated pairs, to try a job without data: shapes, and the same shapes with motion blur."""

import os

import numpy as np

from common.ground.exits import import_optional
from datasets.folders import random_folder

cv2 = import_optional("cv2", "images need OpenCV", "opencv-python-headless")

_FOLDERS = ("a", "b")
_PAIRS = {"train": 13, "test": 4}  # of each folder
_SIZES = ((384, 288), (288, 384), (320, 320))


def make(folder: str) -> str:
    """Create `folder` with {train,test}/{blurry,sharp}/<sub>/*, if it does not exist, and return it."""
    return random_folder.make(folder, _write)


def _write(folder: str) -> None:
    for split, count in _PAIRS.items():
        for number in range(len(_FOLDERS) * count):
            draw = np.random.default_rng([number, split == "test"])
            sharp = _shapes(draw, *_SIZES[number % len(_SIZES)])
            length, angle = draw.uniform(9, 25), draw.uniform(0, np.pi)
            sub = _FOLDERS[number % len(_FOLDERS)]
            for side, image in (("sharp", sharp), ("blurry", _moved(sharp, length, angle))):
                target = os.path.join(folder, split, side, sub)
                os.makedirs(target, exist_ok=True)
                path = os.path.join(target, f"{number:03}.jpg")
                if not cv2.imwrite(path, image, [cv2.IMWRITE_JPEG_QUALITY, 95]):
                    raise OSError(f"cannot write {path}")


def _shapes(draw: np.random.Generator, width: int, height: int) -> np.ndarray:
    image = np.full((height, width, 3), draw.integers(0, 256, 3), np.uint8)
    for _ in range(12):
        center = int(draw.integers(width)), int(draw.integers(height))
        colour, radius = draw.integers(0, 256, 3).tolist(), int(draw.integers(10, 60))
        if draw.random() < 0.5:
            cv2.circle(image, center, radius, colour, -1, cv2.LINE_AA)
        else:
            corner = center[0] + radius, center[1] + radius // 2
            cv2.rectangle(image, center, corner, colour, -1)
    return image


def _moved(image: np.ndarray, length: float, angle: float) -> np.ndarray:
    """Return the image with motion blur of `length` pixels in the direction `angle`."""
    side = int(np.ceil(length)) | 1
    kernel, middle = np.zeros((side, side), np.float32), side // 2
    reach = np.array([np.cos(angle), np.sin(angle)]) * middle
    start, end = (tuple(np.rint(middle + sign * reach).astype(int).tolist()) for sign in (-1, 1))
    cv2.line(kernel, start, end, 1.0)
    return cv2.filter2D(image, -1, kernel / kernel.sum(), borderType=cv2.BORDER_REFLECT)
