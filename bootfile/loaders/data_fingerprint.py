"""Digests of data of any type: the fingerprint of a data set, and the hash of a sample's target.

A fingerprint has 64 items and all numbers of a data set. data_lists.py has a digest of what it lists.
"""

import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from bootfile.ground.errors import print_line
from bootfile.processes import ranks

_ITEMS = 64  # items that are read, evenly spaced
_AGAIN = 0.5  # seconds for reading items twice
_WHOLE = 1 << 28  # bytes: of larger arrays only some rows are digested


def fingerprint(dataset: Any, read: Callable[[np.ndarray], list[Any]]) -> str:
    """Return a digest of a map-style dataset, 32 hex digits.

    If the dataset has a `fingerprint` (any text), only that is digested. Otherwise: its length; its
    attributes that are tensors, arrays or lists of numbers (above 256 MB only evenly spaced rows); the names
    and labels in torchvision's `samples`; and 64 evenly spaced items. The folder of the files does not count.
    read(ids): returns items, with the same random transforms in every process.
    """
    digest = hashlib.sha256()
    _add_dataset(digest, dataset)
    if not isinstance(getattr(dataset, "fingerprint", None), str):
        for item in read(_spread(len(dataset))):
            add(digest, item)
    return digest.hexdigest()[:32]


def find_unstable(dataset: Any, read: Callable[[np.ndarray], Any]) -> int | None:
    """Return the first of some samples that differs when it is read twice; None if none does. At least two
    samples are read, and more for up to half a second. read(id): returns a digest of a sample. id: int64
    [1]."""
    # an item may be slow: the start of a job does not wait longer than this for a warning
    end = time.monotonic() + _AGAIN
    for place, id in enumerate(_spread(len(dataset))):
        if read(id[None]) != read(id[None]):
            return int(id)
        if place and time.monotonic() > end:
            break
    return None


def warn_of_unstable(what: str) -> None:
    """Print a warning on rank 0 that a restart will not be exact. what: differs when it is read again."""
    if ranks.is_first():
        print_line(
            f"warning: {what}: it depends on something that is not seeded, such as a counter, the time or "
            "the worker: a restart will not be exact. Draw from the generators of torch, NumPy or random"
        )


def _spread(size: int) -> np.ndarray:
    """Return evenly spaced ids."""
    return np.unique(np.linspace(0, size - 1, min(size, _ITEMS)).astype(np.int64))


def hash_value(value: Any) -> int:
    """Return an integer itself, and 63 bits of a digest of any other value: a tensor, an array, text, or a
    nested list or dictionary."""
    is_scalar = isinstance(value, torch.Tensor | np.ndarray | np.integer) and value.ndim == 0
    number = value.item() if is_scalar else value
    # a class number itself, so that equal labels of different types count as equal
    if isinstance(number, int) and abs(number) < 2**63:
        return int(number)
    digest = hashlib.blake2b(digest_size=8)
    add(digest, value)
    return int.from_bytes(digest.digest(), "little") >> 1


def _add_dataset(digest: Any, dataset: Any) -> None:
    """Add what a dataset is known by without reading items."""
    name_of_data = getattr(dataset, "fingerprint", None)
    if isinstance(name_of_data, str):
        add(digest, name_of_data)
    elif isinstance(dataset, Subset):
        add(digest, list(dataset.indices))
        _add_dataset(digest, dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            _add_dataset(digest, part)
    else:
        add(digest, len(dataset))
        for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
            # without the folder: the same data may be mounted elsewhere at the next start
            if name == "samples" and hasattr(dataset, "root"):  # torchvision's folders: [(path, label)]
                add(digest, [(os.path.relpath(path, dataset.root), label) for path, label in value])
            elif is_data(value):
                add(digest, name)
                add(digest, value)


def is_data(value: Any) -> bool:
    """Return whether an attribute holds numbers. Others may be paths, which differ from node to node."""
    if isinstance(value, list | tuple) and value:
        return all(isinstance(item, int | float | torch.Tensor | np.ndarray) for item in value)
    return value.dtype.kind in "iufbc" if isinstance(value, np.ndarray) else isinstance(value, torch.Tensor)


def add(digest: Any, value: Any) -> None:
    """Add a value to the digest. Of an array, add also its type and shape."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.layout != torch.strided:  # sparse
            value = value.to_dense()
        value = value.cpu()
        if value.dtype == torch.bfloat16:  # NumPy has no such type
            value = value.float()
        value = value.numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype} {value.shape}".encode())
        if value.nbytes > _WHOLE:
            value = value[np.linspace(0, len(value) - 1, _ITEMS).astype(np.int64)]
        digest.update(np.ascontiguousarray(value).tobytes())
    elif dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        add(digest, getattr(value, "__dict__", fields))  # one with slots has no __dict__
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            add(digest, key)
            add(digest, value[key])
    elif isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim):
        digest.update(f"list {len(value)}".encode())
        for item in value:
            add(digest, item)
    elif isinstance(value, str | bytes | int | float | complex | bool | np.generic | type(None)):
        digest.update(repr(value).encode())
    elif isinstance(value, set | frozenset):  # its order differs from process to process
        add(digest, sorted(map(repr, value)))
    elif hasattr(value, "tobytes"):  # an image of Pillow
        digest.update(value.tobytes())
    else:
        # only the type: the text of an object may hold its address, which differs from start to start
        digest.update(type(value).__name__.encode())
