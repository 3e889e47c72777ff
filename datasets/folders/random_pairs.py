"""Folders of generated pairs, to try a job without data: discs, and the same discs with motion blur."""

import os

import numpy as np

from bootfile.ground.errors import import_optional
from datasets.folders import random_folder

cv2 = import_optional("cv2", "images need OpenCV", "opencv-python-headless")

_FOLDERS = ("a", "b")
_PAIRS = {"train": 13, "test": 4}  # of each folder
_SIZES = ((384, 288), (288, 384), (320, 320))


def make(folder: str) -> str:
    """Create `folder` with {train,test}/{blurry,sharp}/<sub>/*, if it does not exist, and return it."""
    return random_folder.make(folder, _write)


def _write(folder: str) -> None:
    """Write the pairs of both splits. random_folder.make() calls it in the process that holds the lock."""
    for split, count in _PAIRS.items():
        for number in range(len(_FOLDERS) * count):
            draw = np.random.default_rng([number, split == "test"])
            sharp = _shapes(draw, *_SIZES[number % len(_SIZES)])
            blurry = cv2.blur(sharp, (int(draw.integers(9, 26)), 1))  # a motion from left to right
            sub = _FOLDERS[number % len(_FOLDERS)]
            for side, image in (("sharp", sharp), ("blurry", blurry)):
                target = os.path.join(folder, split, side, sub)
                os.makedirs(target, exist_ok=True)
                path = os.path.join(target, f"{number:03}.jpg")
                if not cv2.imwrite(path, image, [cv2.IMWRITE_JPEG_QUALITY, 95]):
                    raise OSError(f"cannot write {path}")


def _shapes(draw: np.random.Generator, width: int, height: int) -> np.ndarray:
    """Return an image of discs, uint8 [height, width, 3]."""
    image = np.full((height, width, 3), draw.integers(0, 256, 3), np.uint8)
    for _ in range(12):
        center = int(draw.integers(width)), int(draw.integers(height))
        colour = draw.integers(0, 256, 3).tolist()
        radius = int(draw.integers(10, 60))
        cv2.circle(image, center, radius, colour, -1, cv2.LINE_AA)
    return image
