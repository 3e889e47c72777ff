"""Fashion-MNIST (H. Xiao et al., arXiv:1708.07747): 60,000 + 10,000 grey images of 28x28 pixels in 10
classes.

The four official files (.gz) are read from data_url, its subfolder raw/ or FashionMNIST/raw/, where
torchvision puts them. Their md5 is checked.
"""

import functools
import os

import numpy as np
import torch

from bootfile.ground.again import is_file
from bootfile.ground.errors import BadInput
from datasets.files import local_folder, read_checked
from datasets.memory.image_set import ImageSet, generate_sets

SIDE = 28  # pixels
# of pixels / 255
MEAN = (0.2860,)
STD = (0.3530,)

MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip

_image_set = functools.partial(
    ImageSet, classes=10, mean=MEAN, std=STD, padding=2, flip=True, class_names=CLASSES
)


def load(data_url: str | None, custom_data: bool) -> tuple[ImageSet, ImageSet]:
    """Return (training set, test set), uint8 [N, 1, 28, 28]. custom_data: generated images of that form.
    Raises BadInput if a file is missing or not the official one."""
    if custom_data:
        return generate_sets(_image_set, channels=1, side=28)
    folder = local_folder(data_url)
    candidates = [os.path.join(folder, below) for below in ("", "raw", os.path.join("FashionMNIST", "raw"))]
    for candidate in candidates:
        if any(is_file(os.path.join(candidate, name)) for name in MD5):
            return _load_part(candidate, "train"), _load_part(candidate, "t10k")
    raise BadInput(
        f"no Fashion-MNIST in {', '.join(candidates)}: put the four official files, "
        f"{', '.join(MD5)}, there (https://github.com/zalandoresearch/fashion-mnist), "
        "or train on generated images with --custom_data=true"
    )


def _load_part(folder: str, part: str) -> ImageSet:
    """Return the training set ("train") or the test set ("t10k"). Raises BadInput."""
    images = _read_numbers(folder, f"{part}-images-idx3-ubyte.gz", header=16)
    labels = _read_numbers(folder, f"{part}-labels-idx1-ubyte.gz", header=8)
    return _image_set(
        torch.from_numpy(images.reshape(-1, 1, 28, 28)),
        torch.from_numpy(labels.astype(np.int64)),
        source=f"official files, md5 checked: {folder}",
    )


def _read_numbers(folder: str, name: str, header: int) -> np.ndarray:
    """Return the numbers of an official file, uint8 [n]. header: bytes before them. Raises BadInput."""
    content = read_checked(os.path.join(folder, name), MD5[name])
    return np.frombuffer(bytearray(content), np.uint8, offset=header)  # not read-only, as torch wants it
