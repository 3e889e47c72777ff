"""CIFAR-10 (A. Krizhevsky, 2009): 50,000 + 10,000 colour images of 32x32 pixels in 10 classes.

Taken from the first of these that is there, in and below data_url:

1. cifar-10-batches-py/ or cifar-10-python.tar.gz, the python version: md5 checked, restricted unpickler;
2. cifar-10-batches-bin/ or cifar-10-binary.tar.gz, the binary version: the archive's md5 is checked, of
   unpacked files, for which none is published, size and labels;
3. train/<class>/* and test/<class>/*, JPEG or PNG: somebody's copy, reported as such;
4. https://www.cs.toronto.edu/~kriz/: downloaded to data_url, md5 checked.

Archives are read in place and never unpacked, so no member of theirs can leave the folder.
"""

import io
import os
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from common.exits import BadInput
from datasets.files import check_md5, download, local_folder, read_checked
from datasets.memory import random_images
from datasets.memory.image_set import ImageSet

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


def load(data_url: str, custom_data: bool) -> tuple[ImageSet, ImageSet]:
    """(training set, test set), uint8 [N, 3, 32, 32]. custom_data: generated images of the same form instead.

    Raises BadInput where nothing usable is found and nothing can be downloaded.
    """
    if custom_data:
        train, test = random_images.generate(channels=3, side=32)
        return _image_set(*train, "generated"), _image_set(*test, "generated")
    folder = local_folder(data_url)
    for find in (_python_folder, _python_archive, _binary_folder, _binary_archive, _class_folders):
        if found := find(folder):
            return found
    archive = os.path.join(folder, "cifar-10-python.tar.gz")
    try:
        download(URL, archive, MD5["cifar-10-python.tar.gz"])
    except BadInput as error:
        raise BadInput(
            f"no CIFAR-10 in {folder}, and {error}. Three ways to go on: "
            "(1) --custom_data=true trains on generated images; "
            "(2) put cifar-10-batches-py/ or cifar-10-python.tar.gz (or the binary version) into a folder "
            "and pass it as --data_url; (3) run where the internet is reachable, and it is downloaded"
        ) from error
    return _python_archive(folder)


def parse_python_batch(name: str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """(images uint8 [n, 3, 32, 32], labels int64 [n]) of one pickled batch; executes nothing. Raises
    BadInput."""
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


def parse_binary_batch(name: str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """(images uint8 [n, 3, 32, 32], labels int64 [n]) of one file of the binary version. Raises BadInput."""
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
    """Loads what the official files consist of (containers, bytes, NumPy arrays) and refuses every other
    name."""

    def find_class(self, module: str, name: str):
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype")}:
            return getattr(np, name)
        if module in {"numpy.core.multiarray", "numpy._core.multiarray"} and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed")


def _python_folder(folder: str):
    folder = _below(folder, "cifar-10-batches-py", "data_batch_1")
    if not folder:
        return None

    def read(name: str):
        path = os.path.join(folder, name)
        return parse_python_batch(path, read_checked(path, MD5[name]))

    return _sets(read, f"python batches, md5 checked: {folder}")


def _python_archive(folder: str):
    archive = _Archive.find(folder, "cifar-10-python.tar.gz")
    if not archive:
        return None

    def read(name: str):
        content = archive.member(f"cifar-10-batches-py/{name}")
        check_md5(f"{archive.path}: {name}", content, MD5[name])
        return parse_python_batch(name, content)

    return _sets(read, f"python archive, md5 checked: {archive.path}")


def _binary_folder(folder: str):
    folder = _below(folder, "cifar-10-batches-bin", "data_batch_1.bin")
    if not folder:
        return None

    def read(name: str):
        path = os.path.join(folder, f"{name}.bin")
        try:
            size = os.path.getsize(path)
            if size != _BATCH * _RECORD:
                raise BadInput(
                    f"{path} has {size} bytes, expected {_BATCH * _RECORD}: truncated or another file"
                )
            with open(path, "rb") as file:
                return parse_binary_batch(path, file.read())
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from error

    return _sets(read, f"binary version, sizes checked: {folder}")


def _binary_archive(folder: str):
    archive = _Archive.find(folder, "cifar-10-binary.tar.gz")
    if not archive:
        return None

    def read(name: str):
        return parse_binary_batch(name, archive.member(f"cifar-10-batches-bin/{name}.bin"))

    return _sets(read, f"binary archive, md5 checked: {archive.path}")


def _class_folders(folder: str):
    train, test = os.path.join(folder, "train"), os.path.join(folder, "test")
    if not (os.path.isdir(train) and os.path.isdir(test)):
        return None
    classes = sorted(entry.name for entry in os.scandir(train) if entry.is_dir())
    if len(classes) != 10:
        raise BadInput(f"{train} has {len(classes)} class folders, CIFAR-10 has 10")
    source = f"class folders, a copy without published checksums: {folder}"
    names = tuple(classes)
    return tuple(_image_set(*_decode_folder(part, classes), source, names) for part in (train, test))


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
        except Exception as error:  # Pillow raises many kinds for a damaged file
            raise BadInput(f"cannot decode {paths[index]}: {error}") from error

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(decode, range(len(paths))):
            pass
    return images, torch.tensor(labels)


class _Archive:
    """A .tar.gz with a known md5, read once; its regular files by name."""

    def __init__(self, path: str):
        self.path = path
        content = read_checked(path, MD5[os.path.basename(path)])
        self._members = {}
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            for member in tar:
                if member.isfile():
                    self._members[member.name] = tar.extractfile(member).read()

    @classmethod
    def find(cls, folder: str, name: str):
        path = os.path.join(folder, name)
        return cls(path) if os.path.isfile(path) else None

    def member(self, name: str) -> bytes:
        if name not in self._members:
            raise BadInput(f"{self.path} holds no {name}")
        return self._members[name]


def _below(folder: str, name: str, file: str) -> str | None:
    """The folder itself or its subfolder `name`, whichever holds `file`; the subfolder also if it holds
    nothing."""
    if os.path.isfile(os.path.join(folder, file)):
        return folder
    subfolder = os.path.join(folder, name)
    return subfolder if os.path.isdir(subfolder) else None


def _sets(read, source: str) -> tuple[ImageSet, ImageSet]:
    def gather(names: list[str]) -> ImageSet:
        images, labels = zip(*(read(name) for name in names), strict=True)
        return _image_set(
            torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(labels)), source
        )

    return gather(TRAIN_FILES), gather(TEST_FILES)


def _image_set(
    images: torch.Tensor, labels: torch.Tensor, source: str, class_names: tuple[str, ...] = CLASSES
) -> ImageSet:
    # One normalisation for every source, generated images included: a checkpoint means the same everywhere.
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return ImageSet(images, labels, 10, mean, std, 4, True, source, class_names)
