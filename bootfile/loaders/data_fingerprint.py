"""Digests of data of any type: the fingerprint of a data set, and the hash of a sample's target.

A fingerprint has 64 items and all numbers of a data set. A label that is corrected in a table of a million
rows is seen only by list_of(): a digest of the names and labels that the data set lists, without items.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from bootfile.ground.errors import print_line
from bootfile.ground.mixing import mix, to_words
from bootfile.processes import ranks

_ITEMS = 64  # items that are read, evenly spaced
_AGAIN = 0.5  # seconds for reading items twice
_WHOLE = 1 << 28  # bytes: of larger arrays only some rows are digested
_MANY = 32  # entries of a list that is data; a shorter one is a setting, unless the data set is short, too
_MOST = 4096  # numbers of a tensor in such a list; a larger one is an input, not a label
_PART = 10_000  # entries of a list that are written at a time


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


def hash_rows(values: Any) -> np.ndarray:
    """Return an int64 for each row: the number of an integer label, or a hash of the bytes, for a tensor not
    that of hash_value(). values: a tensor [n, ...] on any device, or a list."""
    if isinstance(values, torch.Tensor) and values.dtype != torch.bfloat16 and len(values):
        # one call for all rows: a loop over them would take longer than reading the batch
        rows = values.detach().cpu().numpy()
        if rows.ndim == 1 and rows.dtype.kind in "iub":
            return rows.astype(np.int64)
        return _hash_words(np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8))
    return np.array([hash_value(value) for value in values], np.int64)


def _hash_words(rows: np.ndarray) -> np.ndarray:
    """Return a 63-bit hash of each row of uint8 [n, m]. Each word is mixed with its position (SplitMix64)."""
    words = to_words(rows)
    mixed = mix(words + np.arange(words.shape[1], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    hashes: np.ndarray = (mixed.sum(axis=1) >> np.uint64(1)).astype(np.int64)
    return hashes


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


def list_of(dataset: Any) -> dict[str, str]:
    """Return a digest of what a dataset lists of its samples, for an Index; {} if it lists nothing."""
    # the tensors of a TensorDataset are in the fingerprint
    digest = "" if type(dataset) is TensorDataset else digest_entries(dataset)
    return {"list of training samples": digest} if digest else {}


def digest_entries(dataset: Any) -> str:
    """Return a digest of the lists of a map-style dataset; "" if it has none, or a `fingerprint`.

    These are attributes that are lists, dictionaries or tables, also of a dataset inside it. The folder above
    all paths in a list, or in rows that are lists, does not count: the data may be mounted elsewhere at the
    next start. In dictionaries as rows and in tables it counts. Call it before an item is read, which may
    fill a cache.
    """
    digest = hashlib.sha256()
    empty = digest.hexdigest()
    _add_entries(digest, dataset, set())
    return "" if digest.hexdigest() == empty else digest.hexdigest()[:32]


def _add_entries(digest: Any, dataset: Any, seen: set[int]) -> None:
    """Add what a dataset and the datasets inside it list of their samples."""
    if id(dataset) in seen or isinstance(getattr(dataset, "fingerprint", None), str):
        return
    seen.add(id(dataset))
    if isinstance(dataset, list | tuple):  # a DataLoader takes it as a data set
        _add_list(digest, "", dataset)
    shortest = _MANY  # entries of a list that is data
    with contextlib.suppress(TypeError, NotImplementedError):  # a dataset without a length
        shortest = max(1, min(_MANY, len(dataset)))
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        if hasattr(value, "columns") and hasattr(value, "to_dict"):  # a table of pandas
            _add_list(digest, name, value.to_dict("list"))
            continue
        inside = list(value.values()) if isinstance(value, dict) else value
        parts = inside if isinstance(inside, list | tuple) else [inside]
        if parts and all(isinstance(part, Dataset) for part in parts):
            for part in parts:
                _add_entries(digest, part, seen)
        # a list that has two names is added once: `imgs` of torchvision's folders is `samples`
        elif isinstance(value, list | tuple | dict) and len(value) >= shortest and id(value) not in seen:
            seen.add(id(value))
            _add_list(digest, name, value)


def _add_list(digest: Any, name: str, value: Any) -> None:
    """Add nested lists and dictionaries as text, without the folder above all paths in them."""
    if isinstance(value, dict):
        value = sorted(value.items(), key=lambda entry: str(entry[0]))
    folder = _folder_of(value)
    parts = []
    try:
        for first in range(0, len(value), _PART):
            part = json.dumps(value[first : first + _PART], default=_plain_entry, sort_keys=True)
            if folder:
                part = part.replace(json.dumps(folder)[1:-1], "")
            parts.append(part)
    except (TypeError, ValueError, RecursionError):  # keys of other types, or a list that holds itself
        return
    add(digest, name)
    add(digest, parts)


def _folder_of(entries: Any) -> str:
    """Return the folder that all paths begin with, with a separator at its end; "" without one."""
    rows = (entry if isinstance(entry, list | tuple) else [entry] for entry in entries)
    texts = (os.fspath(field) if isinstance(field, os.PathLike) else field for row in rows for field in row)
    paths = [text for text in texts if isinstance(text, str) and os.sep in text]
    try:
        # what the first and the last one in the alphabet share is shared by all
        folder = os.path.commonpath([os.path.dirname(min(paths)), os.path.dirname(max(paths))])
    except ValueError:  # no path, or absolute and relative ones
        return ""
    return "" if folder in ("", os.sep) else folder + os.sep


def _plain_entry(value: Any) -> Any:
    """Return a value that JSON does not know as text or a number."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor | np.ndarray) and math.prod(value.shape) <= _MOST:
        return hash_value(value)
    # only the type: the text of an object may hold its address
    return value.isoformat() if hasattr(value, "isoformat") else type(value).__name__
