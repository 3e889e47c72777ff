"""Generate data for benchmarks: more images than datasets/folders/random_folder.py makes, for long epochs."""

import itertools
import os

import numpy as np

from datasets.folders import random_folder
from datasets.memory import cifar10

_COPIES = 8  # default number of names for each image: 5,120 names for training
_RECORDS = 10_000  # of a file of CIFAR-10


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


def cifar_folder(cache: str) -> str:
    """Return a folder of random pixels in the format of CIFAR-10's binary version, for --data_url."""

    def write(folder: str) -> None:
        draw = np.random.default_rng(2024)
        for name in (*cifar10.TRAIN_FILES, *cifar10.TEST_FILES):
            records = draw.integers(0, 256, (_RECORDS, 1 + 3 * cifar10.SIDE**2), dtype=np.uint8)
            records[:, 0] = np.arange(_RECORDS) % len(cifar10.CLASSES)
            records.tofile(os.path.join(folder, f"{name}.bin"))

    return random_folder.make(os.path.join(os.path.abspath(cache), "generated-cifar10"), write)
