"""A digest of the names and labels that a data set of the user lists, without items.

The fingerprint of a data set has 64 items: a label that is corrected in a table of a million rows is seen
only here. A TensorDataset lists nothing: its tensors are in the fingerprint. A loop of it does not load this
module.
"""

import contextlib
import hashlib
import json
import math
import os
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from bootfile.loaders.data_fingerprint import add, hash_value

_MANY = 32  # entries of a list that is data; a shorter one is a setting, unless the data set is short, too
_MOST = 4096  # numbers of a tensor in such a list; a larger one is an input, not a label
_PART = 10_000  # entries of a list that are written at a time


def list_of(dataset: Any) -> dict[str, str]:
    """Return a digest of what a dataset lists of its samples, for an Index; {} if it lists nothing."""
    digest = digest_entries(dataset)
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
        parts = list(value) if isinstance(value, list | tuple) else [value]
        if isinstance(value, dict):
            parts = list(value.values())
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
    if hasattr(value, "isoformat"):
        return value.isoformat()
    # only the type: the text of an object may hold its address
    return type(value).__name__
