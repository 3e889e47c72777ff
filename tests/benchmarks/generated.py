"""Generate data for benchmarks: more images than datasets/folders/random_folder.py makes, for long epochs."""

import itertools
import os

import numpy as np

from datasets.folders import random_folder
from datasets.memory import cifar10

_COPIES = 8  # default number of names for each image: 5,120 names for training


def image_folder(cache: str, copies: int = _COPIES) -> str:
    """Return a folder of generated JPEG files below `cache`, each under several names; made if missing."""
    source = random_folder.make(os.path.join(os.path.abspath(cache), "generated"))

    def write(folder: str) -> None:
        for parent, _, names in os.walk(source):
            target = os.path.join(folder, os.path.relpath(parent, source))
            os.makedirs(target, exist_ok=True)
            for name, copy in itertools.product(names, range(copies)):
                os.link(os.path.join(parent, name), os.path.join(target, f"{copy}-{name}"))

    return random_folder.make(os.path.join(os.path.abspath(cache), f"generated-{copies}"), write)


def cifar_folder(cache: str, count: int = 5_000) -> str:
    """Return class folders of random pixels in CIFAR-10's form, made below `cache` if missing.

    count: training images of each class; a fifth of them are for testing.
    """

    def write(folder: str) -> None:
        draw = np.random.default_rng(2024)
        for split, images in (("train", count), ("test", count // 5)):
            for name in cifar10.CLASSES:
                os.makedirs(os.path.join(folder, split, name))
                for number in range(images):
                    with open(os.path.join(folder, split, name, f"{number}.ppm"), "wb") as file:
                        file.write(b"P6 32 32 255\n" + draw.bytes(3 * 32 * 32))

    return random_folder.make(os.path.join(os.path.abspath(cache), f"generated-cifar10-{count}"), write)
