"""CIFAR-10 (A. Krizhevsky, 2009): 50,000 + 10,000 colour images of 32x32 pixels in 10 classes.

It is loaded from the first of these that exists in or below data_url:

1. cifar-10-batches-py/ or cifar-10-python.tar.gz, the python version: md5 checked, restricted unpickler;
2. folders of splits, such as train/<class>/* and test/<class>/* (datasets/folders/listing.py): a copy,
   reported as such;
3. https://www.cs.toronto.edu/~kriz/: downloaded to data_url, md5 checked.

The archive is read in place and never unpacked, so no member of it can leave the folder.
"""

import functools
import io
import os
import pickle
import tarfile
from typing import Any

import numpy as np
import torch

from bootfile.ground.again import is_file, is_folder, read_whole, refusal
from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained
from datasets.downloads import download
from datasets.files import local_folder, read_checked
from datasets.memory.image_set import ImageSet, generate_sets

SIDE = 32  # pixels
# of pixels / 255
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
TRAIN_FILES = [f"data_batch_{number}" for number in range(1, 6)]
TEST_FILES = ["test_batch"]
MD5 = {  # https://www.cs.toronto.edu/~kriz/cifar.html and torchvision's table of the same files
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
}
ARCHIVE = "cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"
URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"
CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_Sets = tuple[ImageSet, ImageSet]
# the same normalisation for every source and for generated images, so checkpoints fit all of them
_image_set = functools.partial(
    ImageSet, classes=10, mean=MEAN, std=STD, padding=4, flip=True, class_names=CLASSES
)


def load(data_url: str | None, custom_data: bool) -> _Sets:
    """Return (training set, test set), uint8 [N, 3, 32, 32]. custom_data: generated images of that form.
    Every rank calls it at the start of a job; of the processes of a node one downloads. Raises BadInput if
    nothing usable is found and nothing can be downloaded."""
    if custom_data:
        return generate_sets(_image_set, channels=3, side=32)
    folder = local_folder(data_url)
    names: list[str] = sorted(os.listdir(folder)) if is_folder(folder) else []
    data: _Sets | None = _load_python(folder) or _load_class_folders(folder) if names else None
    if data:
        return data
    # another form, which a download must not replace; the others are what an earlier download has left
    others = [name for name in names if "cifar" in name.lower() and not name.startswith((".", ARCHIVE))]
    try:
        if others:
            raise BadInput(f"{', '.join(others)} is another form or data set, or one folder deeper")
        download(URL, os.path.join(folder, ARCHIVE), MD5[ARCHIVE])
    except BadInput as error:
        raise BadInput(
            f"no CIFAR-10 in {folder}, and {error}. Three ways to continue: "
            "(1) --custom_data=true trains on generated images; "
            f"(2) put {FOLDER}/ or {ARCHIVE} into a folder and pass it as --data_url; "
            "(3) run it with access to the internet, and it is downloaded"
        ) from error
    data = _load_python(folder)
    assert data, "the archive is there now"
    return data


def _parse(name: str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return (images uint8 [n, 3, 32, 32], labels int64 [n]) of an official file without executing its code.
    Raises BadInput."""
    # a hostile or damaged pickle can raise anything
    with explained(f"{name} is not a CIFAR-10 python batch", Exception):
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        return batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[b"labels"], np.int64)


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that loads only containers, bytes and NumPy arrays, as in the official files."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or a function that the pickle asks for. Unpickler calls it."""
        # anything else in a pickle could run code
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype")}:
            return getattr(np, name)
        if module in {"numpy.core.multiarray", "numpy._core.multiarray"} and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed")


def _load_python(folder: str) -> _Sets | None:
    """Load the official batches from the folder, its subfolder or its archive; None if it has none."""
    place = os.path.join(folder, FOLDER)
    archive = os.path.join(folder, ARCHIVE)
    # the user may name the folder of the batches itself
    if is_file(os.path.join(folder, TRAIN_FILES[0])):
        place = folder
    names = TRAIN_FILES + TEST_FILES
    if is_folder(place):
        contents = {name: read_checked(os.path.join(place, name), MD5[name]) for name in names}
    elif is_file(archive):
        place = archive
        with tarfile.open(fileobj=io.BytesIO(read_checked(archive, MD5[ARCHIVE]))) as tar:
            files = {name: tar.extractfile(f"{FOLDER}/{name}") for name in names}
            contents = {name: file.read() for name, file in files.items() if file}
    else:
        return None

    def gather(names: list[str]) -> ImageSet:
        """Return the set of some batches."""
        parts = [_parse(os.path.join(place, name), contents[name]) for name in names]
        images = np.concatenate([images for images, _ in parts])
        labels = np.concatenate([labels for _, labels in parts])
        source = f"official files, checked: {place}"
        return _image_set(torch.from_numpy(images), torch.from_numpy(labels), source=source)

    return gather(TRAIN_FILES), gather(TEST_FILES)


def _load_class_folders(folder: str) -> _Sets | None:
    """Load images from folders of splits; None if there are none. load() calls it if the official files are
    missing. Raises BadInput."""
    from datasets.folders import listing  # import Pillow, which the official files do not need

    # only folders with splits: other folders of images are not a copy of CIFAR-10
    names = [listing.find_split(folder, split) for split in listing.SPLITS]
    if not any(name and is_folder(os.path.join(folder, name)) for name in names):
        return None
    train = listing.look(folder, "train", None, lambda line: None)
    if len(train.classes) != 10:
        raise BadInput(f"{train.base} has {len(train.classes)} class folders, CIFAR-10 has 10")
    test = listing.look(folder, "val", train.classes, lambda line: None)
    source = f"class folders, a copy without published checksums: {train.base} and {test.base}"

    def make(part: listing.Listing) -> ImageSet:
        labels = torch.from_numpy(part.labels)
        return _image_set(_decode(part), labels, source=source, class_names=train.classes)

    return make(train), make(test)


def _decode(part: Any) -> torch.Tensor:
    """Return the images of a listing.Listing, uint8 [N, 3, 32, 32]. Raises BadInput."""
    from datasets.folders import images

    pixels = torch.empty(len(part.paths), 32, 32, 3, dtype=torch.uint8)
    for row, name in enumerate(part.paths):
        path = os.path.join(part.base, name)
        try:
            image = images.decode(read_whole(path))
        except (OSError, images.BadImage) as error:
            raise refusal(f"cannot decode {path}: {error}", error) from error
        if image.shape != (32, 32, 3):
            raise BadInput(f"{path} is {image.shape[1]}x{image.shape[0]} pixels, expected 32x32")
        pixels[row] = torch.from_numpy(image)
    return pixels.permute(0, 3, 1, 2).contiguous()
