"""The 1,797 real handwritten digits that ship inside scikit-learn: 8x8 pixels, 10 classes, no download.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998.
"""

import functools

import torch

from common.ground.exits import import_optional
from datasets.files import local_folder
from datasets.memory.image_set import ImageSet, generate_sets

SIDE, MEAN, STD = 8, (0.3047,), (0.3756,)  # pixels; of pixels / 255

# no flips: a mirrored digit is another digit or not a digit
_image_set = functools.partial(
    ImageSet, classes=10, mean=MEAN, std=STD, padding=1, flip=False, class_names=tuple(map(str, range(10)))
)


def load(data_url: str | None, custom_data: bool) -> tuple[ImageSet, ImageSet]:
    """Return (training set [1438, 1, 8, 8], test set [359, 1, 8, 8]), uint8.

    Every fifth image of each digit is in the test set. custom_data: generated images of that form. Raises
    BadInput.
    """
    if custom_data:
        return generate_sets(_image_set, channels=1, side=8)
    local_folder(data_url)  # the folder is not used, but a wrong path is an error
    sklearn = import_optional("sklearn.datasets", "--dataset digits needs scikit-learn", "scikit-learn")
    digits = sklearn.load_digits()
    images = torch.from_numpy(digits.images * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    in_test = torch.zeros(len(images), dtype=torch.bool)
    in_test[labels.argsort(stable=True)[4::5]] = True
    source = "scikit-learn (1,797 real digits)"
    train, test = (_image_set(images[rows], labels[rows], source=source) for rows in (~in_test, in_test))
    return train, test
