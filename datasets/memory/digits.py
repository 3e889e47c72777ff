"""The 1,797 real handwritten digits that ship inside scikit-learn: 8x8 pixels, 10 classes, no download.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998.
"""

import functools
import importlib.util
import os

import numpy as np
import torch

from bootfile.ground.errors import MissingPackage
from bootfile.ground.files import explained, read_again
from datasets.files import local_folder
from datasets.memory.image_set import ImageSet, generate_sets

SIDE = 8  # pixels
# of pixels / 255
MEAN = (0.3047,)
STD = (0.3756,)

# no flips: a mirrored digit is another digit or not a digit
_image_set = functools.partial(
    ImageSet, classes=10, mean=MEAN, std=STD, padding=1, flip=False, class_names=tuple(map(str, range(10)))
)


def load(data_url: str | None, custom_data: bool) -> tuple[ImageSet, ImageSet]:
    """Return (training set [1438, 1, 8, 8], test set [359, 1, 8, 8]), uint8. Every fifth image of each digit
    is in the test set. custom_data: generated images of that form. Raises BadInput."""
    if custom_data:
        return generate_sets(_image_set, channels=1, side=8)
    local_folder(data_url)  # the folder is not used, but a wrong path is an error
    table = torch.from_numpy(read())
    images = (table[:, :-1].view(-1, 1, SIDE, SIDE) * (255 / 16)).round().to(torch.uint8)
    labels = table[:, -1].long()
    # every fifth image in the order of the classes: the same ones on every machine
    in_test = torch.zeros(len(images), dtype=torch.bool)
    in_test[labels.argsort(stable=True)[4::5]] = True
    source = "scikit-learn (1,797 real digits)"
    train = _image_set(images[~in_test], labels[~in_test], source=source)
    test = _image_set(images[in_test], labels[in_test], source=source)
    return train, test


def read() -> np.ndarray:
    """Return scikit-learn's table, float64 [1797, 65]: the pixels of a digit, 0 to 16, and its label. It is
    read without an import of scikit-learn, which takes a second. Raises BadInput."""
    package = importlib.util.find_spec("sklearn")
    if not (package and package.origin):
        raise MissingPackage("--dataset digits needs scikit-learn: pip install scikit-learn")
    path = os.path.join(os.path.dirname(package.origin), "datasets", "data", "digits.csv.gz")
    with explained(f"{path} cannot be read"):
        return read_again(functools.partial(np.loadtxt, path, delimiter=","), path)
