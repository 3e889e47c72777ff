"""Folders of generated JPEG files, to try a job without data: ten learnable classes."""

import math
import os
from collections.abc import Callable

import numpy as np
from PIL import Image

from common.ground.files import locked, make_folder_atomic

CLASSES = 10
TRAIN = 64  # images per class
VAL = 16
_SIZES = ((320, 240), (240, 320), (300, 300))


def make(folder: str, write: Callable[[str], object] | None = None) -> str:
    """Create `folder`, if it does not exist, and return it.

    write: called with an empty folder, which it fills (default: train/<class>/* and val/<class>/*).
    Every rank calls it: of several processes one fills the folder, and the others wait for the lock.
    """
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with locked(f"{folder}.lock"):
        if not os.path.isdir(folder):
            with make_folder_atomic(folder) as new:
                (write or _write_classes)(new)
    return folder


def _write_classes(folder: str) -> None:
    """Write the images of both splits. make() calls it in the process that holds the lock."""
    for split, count in (("train", TRAIN), ("val", VAL)):
        for label in range(CLASSES):
            _write(os.path.join(folder, split, f"class_{label}"), split, label, count)


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
