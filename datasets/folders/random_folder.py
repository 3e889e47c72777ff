"""Folders of generated JPEG files, to try a job without data: ten learnable classes, or blurry pairs."""

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from bootfile.ground.errors import import_optional
from common.ground.shared_folders import locked, make_folder_atomic

CLASSES = 10
TRAIN = 64  # images per class
VAL = 16
_SIZES = ((320, 240), (240, 320), (300, 300))
_SUBFOLDERS = ("a", "b")
_PAIRS = {"train": 13, "test": 4}  # of each folder
_PAIR_SIZES = ((384, 288), (288, 384), (320, 320))


def make(folder: str, write: Callable[[str], object] | None = None) -> str:
    """Create `folder`, if it does not exist, and return it.

    write: called with an empty folder, which it fills (default: train/<class>/* and val/<class>/*).
    Every rank calls it: of several processes one fills the folder, and the others wait for the lock.
    """
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with locked(f"{folder}.lock"):
        if not os.path.isdir(folder):
            with make_folder_atomic(folder) as new:
                if write:
                    write(new)
                else:
                    for split, count in (("train", TRAIN), ("val", VAL)):
                        for label in range(CLASSES):
                            _write(os.path.join(new, split, f"class_{label}"), split, label, count)
    return folder


def _write(folder: str, split: str, label: int, count: int) -> None:
    """Write the images of a class: a colour and a direction of stripes, with random phase and noise."""
    os.makedirs(folder)
    draw = np.random.default_rng([label, split == "val"])
    angle = math.pi * label / CLASSES
    colour = (label % 3 / 4, label % 4 / 4, label % 5 / 4)
    side = 2 * max(map(max, _SIZES))
    noise = 128 + draw.normal(0, 20, (3, side, side)).astype(np.float32)  # each image gets a part of it
    for number in range(count):
        width, height = _SIZES[number % len(_SIZES)]
        x = np.arange(width, dtype=np.float32)
        y = np.arange(height, dtype=np.float32)[:, None]
        wave = np.sin((x * math.cos(angle) + y * math.sin(angle)) / 9 + draw.uniform(0, 2 * math.pi))
        left = draw.integers(side - width)
        top = draw.integers(side - height)
        pixels = noise[:, top : top + height, left : left + width].copy()
        for channel, less in enumerate(colour):
            pixels[channel] += 60 * (1 - less) * wave
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8).transpose(1, 2, 0).copy())
        image.save(os.path.join(folder, f"{number:03}.jpg"), quality=85)


def make_pairs(folder: str) -> str:
    """Create `folder` with {train,test}/{blurry,sharp}/<sub>/*, if it does not exist, and return it."""
    return make(folder, _write_pairs)


def _write_pairs(folder: str) -> None:
    """Write discs, and the same discs with motion blur. make() calls it in the process with the lock."""
    cv2 = import_optional("cv2", "images need OpenCV", "opencv-python-headless")
    for split, count in _PAIRS.items():
        for number in range(len(_SUBFOLDERS) * count):
            draw = np.random.default_rng([number, split == "test"])
            sharp = _shapes(cv2, draw, *_PAIR_SIZES[number % len(_PAIR_SIZES)])
            blurry = cv2.blur(sharp, (int(draw.integers(9, 26)), 1))  # a motion from left to right
            sub = _SUBFOLDERS[number % len(_SUBFOLDERS)]
            for side, image in (("sharp", sharp), ("blurry", blurry)):
                target = os.path.join(folder, split, side, sub)
                os.makedirs(target, exist_ok=True)
                path = os.path.join(target, f"{number:03}.jpg")
                if not cv2.imwrite(path, image, [cv2.IMWRITE_JPEG_QUALITY, 95]):
                    raise OSError(f"cannot write {path}")


def _shapes(cv2: Any, draw: np.random.Generator, width: int, height: int) -> np.ndarray:
    """Return an image of discs, uint8 [height, width, 3]."""
    image = np.full((height, width, 3), draw.integers(0, 256, 3), np.uint8)
    for _ in range(12):
        center = int(draw.integers(width)), int(draw.integers(height))
        colour = draw.integers(0, 256, 3).tolist()
        radius = int(draw.integers(10, 60))
        cv2.circle(image, center, radius, colour, -1, cv2.LINE_AA)
    return image
