"""CIFAR-10 (A. Krizhevsky, 2009): 50,000 + 10,000 colour images of 32x32 pixels in 10 classes.

It is loaded from the first of these that exists in or below data_url:

1. cifar-10-batches-py/ or cifar-10-python.tar.gz, the python version: md5 checked, restricted unpickler;
2. cifar-10-batches-bin/ or cifar-10-binary.tar.gz, the binary version: the archive's md5 is checked. Of
   unpacked files, which have no published md5, size and labels are checked;
3. train/<class>/* and test/<class>/*, JPEG or PNG: a copy, reported as such;
4. https://www.cs.toronto.edu/~kriz/: downloaded to data_url, md5 checked.

Archives are read in place and never unpacked, so no member of an archive can leave the folder.
"""

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from common.ground.exits import BadInput
from datasets.files import check_md5, download, local_folder, read_checked
from datasets.memory.image_set import ImageSet, generate_images

SIDE, MEAN, STD = 32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # pixels; of pixels / 255
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
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
}
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_RECORD = 1 + 3 * 32 * 32  # the binary version: label, then the red, green and blue planes
_BATCH = 10_000  # images in each official file
_SUFFIXES = (".jpg", ".jpeg", ".png")
_Batch = tuple[np.ndarray, np.ndarray]  # images, labels
_Sets = tuple[ImageSet, ImageSet]


def load(data_url: str | None, custom_data: bool) -> _Sets:
    """Return (training set, test set), uint8 [N, 3, 32, 32]. custom_data: generated images of that form.

    Raises BadInput if nothing usable is found and nothing can be downloaded.
    """
    if custom_data:
        train, test = generate_images(channels=3, side=32)
        return _image_set(*train, "generated"), _image_set(*test, "generated")
    folder = local_folder(data_url)
    for find in (_load_python, _load_binary, _load_class_folders):
        if data := find(folder):
            return data
    archive = os.path.join(folder, "cifar-10-python.tar.gz")
    try:
        download(URL, archive, MD5["cifar-10-python.tar.gz"])
    except BadInput as error:
        raise BadInput(
            f"no CIFAR-10 in {folder}, and {error}. Three ways to continue: "
            "(1) --custom_data=true trains on generated images; "
            "(2) put cifar-10-batches-py/ or cifar-10-python.tar.gz (or the binary version) into a folder "
            "and pass it as --data_url; (3) run it with access to the internet, and it is downloaded"
        ) from error
    data = _load_python(folder)
    assert data, "the archive is there now"
    return data


def parse_python_batch(name: str, content: bytes) -> _Batch:
    """Return (images uint8 [n, 3, 32, 32], labels int64 [n]) of a pickled batch without executing its code.
    Raises BadInput."""
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        images = np.asarray(batch[b"data"])
        labels = np.asarray(batch[b"labels"], dtype=np.int64)
    except Exception as error:  # a hostile or damaged pickle can raise anything
        raise BadInput(f"{name} is not a CIFAR-10 python batch: {type(error).__name__}: {error}") from error
    if (
        images.dtype != np.uint8
        or images.ndim != 2
        or images.shape[1] != _RECORD - 1
        or len(images) != len(labels)
    ):
        raise BadInput(f"{name}: images are {images.dtype} {list(images.shape)} for {len(labels)} labels")
    _check_labels(name, labels)
    return images.reshape(-1, 3, 32, 32), labels


def parse_binary_batch(name: str, content: bytes) -> _Batch:
    """Return (images uint8 [n, 3, 32, 32], labels int64 [n]) of a file of the binary version. Raises
    BadInput."""
    if not content or len(content) % _RECORD:
        raise BadInput(f"{name} has {len(content)} bytes, not a multiple of {_RECORD}: truncated?")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, _RECORD)
    labels = records[:, 0].astype(np.int64)
    _check_labels(name, labels)
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def _check_labels(name: str, labels: np.ndarray) -> None:
    if len(labels) == 0 or labels.min() < 0 or labels.max() > 9:
        span = f"{labels.min()}..{labels.max()}" if len(labels) else "none"
        raise BadInput(f"{name}: labels are {span}, expected 0..9")


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that loads only containers, bytes and NumPy arrays, as in the official files."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype")}:
            return getattr(np, name)
        if module in {"numpy.core.multiarray", "numpy._core.multiarray"} and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed")


def _load_python(folder: str) -> _Sets | None:
    def parse(path: str, content: bytes) -> _Batch:
        check_md5(path, content, MD5[os.path.basename(path)])
        return parse_python_batch(path, content)

    return _load_batches(folder, "cifar-10-batches-py", "", "cifar-10-python.tar.gz", parse)


def _load_binary(folder: str) -> _Sets | None:
    def parse(path: str, content: bytes) -> _Batch:
        if len(content) != _BATCH * _RECORD:
            raise BadInput(
                f"{path} has {len(content)} bytes, expected {_BATCH * _RECORD}: truncated or another file"
            )
        return parse_binary_batch(path, content)

    return _load_batches(folder, "cifar-10-batches-bin", ".bin", "cifar-10-binary.tar.gz", parse)


def _load_batches(
    folder: str,
    below: str,
    ending: str,
    archive: str,
    parse: Callable[[str, bytes], _Batch],
) -> _Sets | None:
    """Load the official batches from the folder, its subfolder `below` or its archive; None if it has none.

    ending: of the batches' names. parse: called with the path and the content of a batch.
    """
    place, packed = os.path.join(folder, below), os.path.join(folder, archive)
    if os.path.isfile(os.path.join(folder, f"{TRAIN_FILES[0]}{ending}")):
        place = folder
    members = None
    if not os.path.isdir(place):
        if not os.path.isfile(packed):
            return None
        members, place = _read_archive(packed), os.path.join(packed, below)

    def read(name: str) -> _Batch:
        path = os.path.join(place, name + ending)
        try:
            if members is not None:
                return parse(path, members[f"{below}/{name}{ending}"])
            with open(path, "rb") as file:
                return parse(path, file.read())
        except KeyError:
            raise BadInput(f"{packed} holds no {below}/{name}{ending}") from None
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from error

    def gather(names: list[str]) -> ImageSet:
        images, labels = (np.concatenate(parts) for parts in zip(*map(read, names), strict=True))
        return _image_set(
            torch.from_numpy(images), torch.from_numpy(labels), f"official files, checked: {place}"
        )

    return gather(TRAIN_FILES), gather(TEST_FILES)


def _read_archive(path: str) -> dict[str, bytes]:
    """Return the regular files of a .tar.gz with a known md5, by name. Raises BadInput."""
    with tarfile.open(fileobj=io.BytesIO(read_checked(path, MD5[os.path.basename(path)]))) as tar:
        files = ((member.name, tar.extractfile(member)) for member in tar if member.isfile())
        return {name: file.read() for name, file in files if file}


def _load_class_folders(folder: str) -> _Sets | None:
    train, test = os.path.join(folder, "train"), os.path.join(folder, "test")
    if not (os.path.isdir(train) and os.path.isdir(test)):
        return None
    classes = sorted(entry.name for entry in os.scandir(train) if entry.is_dir())
    if len(classes) != 10:
        raise BadInput(f"{train} has {len(classes)} class folders, CIFAR-10 has 10")
    source = f"class folders, a copy without published checksums: {folder}"
    sets = [_image_set(*_decode_folder(part, classes), source, tuple(classes)) for part in (train, test)]
    return sets[0], sets[1]


def _decode_folder(folder: str, classes: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    from PIL import Image

    paths, labels = [], []
    for label, name in enumerate(classes):
        if not os.path.isdir(os.path.join(folder, name)):
            raise BadInput(f"{folder} has no class folder {name}")
        names = sorted(n for n in os.listdir(os.path.join(folder, name)) if n.lower().endswith(_SUFFIXES))
        paths += [os.path.join(folder, name, n) for n in names]
        labels += [label] * len(names)
    if not paths:
        raise BadInput(f"{folder} holds no {'/'.join(_SUFFIXES)} images")
    images = torch.empty(len(paths), 3, 32, 32, dtype=torch.uint8)

    def decode(index: int) -> None:
        try:
            with Image.open(paths[index], formats=["JPEG", "PNG"]) as image:
                if image.size != (32, 32):
                    width, height = image.size
                    raise BadInput(f"{paths[index]} is {width}x{height} pixels, expected 32x32")
                images[index] = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        except BadInput:
            raise
        except Exception as error:  # Pillow raises many types for a damaged file
            raise BadInput(f"cannot decode {paths[index]}: {error}") from error

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(decode, range(len(paths))):
            pass
    return images, torch.tensor(labels)


def _image_set(
    images: torch.Tensor, labels: torch.Tensor, source: str, class_names: tuple[str, ...] = CLASSES
) -> ImageSet:
    # the same normalisation for every source and for generated images, so checkpoints fit all of them
    return ImageSet(images, labels, 10, MEAN, STD, 4, True, source, class_names)
