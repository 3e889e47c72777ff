"""Folders of generated JPEG files, to try a job without data: ten learnable classes."""

import os
from collections.abc import Callable

import numpy as np
from PIL import Image

from common.files import locked, make_folder_atomic

CLASSES, TRAIN, VAL = 10, 64, 16  # TRAIN, VAL: images per class
_SIZES = ((320, 240), (240, 320), (300, 300))


def make(folder: str, write: Callable[[str], object] | None = None) -> str:
    """Create `folder`, if it does not exist, and return it.

    write: called with an empty folder, which it fills (default: train/<class>/* and val/<class>/*).
    """
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with locked(f"{folder}.lock"):
        if not os.path.isdir(folder):
            with make_folder_atomic(folder) as new:
                (write or _write_classes)(new)
    return folder


def _write_classes(folder: str) -> None:
    for split, count in (("train", TRAIN), ("val", VAL)):
        for label in range(CLASSES):
            _write(os.path.join(folder, split, f"class_{label}"), split, label, count)


def _write(folder: str, split: str, label: int, count: int) -> None:
    """Write the images of a class: a colour and a direction of stripes, with random phase and noise."""
    os.makedirs(folder)
    draw = np.random.default_rng([label, split == "val"])
    angle, colour = np.pi * label / CLASSES, np.array([label % 3, label % 4, label % 5]) / 4
    for number in range(count):
        width, height = _SIZES[number % len(_SIZES)]
        y, x = np.mgrid[:height, :width]
        wave = np.sin((x * np.cos(angle) + y * np.sin(angle)) / 9 + draw.uniform(0, 2 * np.pi))
        pixels = 128 + 60 * wave[:, :, None] * (1 - colour) + draw.normal(0, 20, (height, width, 3))
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        image.save(os.path.join(folder, f"{number:03}.jpg"), quality=85)
