"""The plain attributes of a data set. Workers have a copy of them, so new workers start after the loop has
changed one at an epoch (Workers.load)."""

import collections
import contextlib
import math
import types
from typing import Any

import numpy as np
import torch

_FEW = 16  # items of a list, or numbers of an array, that are compared one by one
_DEPTH = 6  # attributes of attributes: of the transforms in a list, of a dataset in a Subset
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, np.number, np.bool_)
_LISTS = (list, tuple, collections.deque)
_CONTAINERS = (*_LISTS, set, frozenset, dict)
_WITHOUT = (type, types.ModuleType, types.FunctionType, types.MethodType)  # their attributes do not count


def read_attributes(*owners: Any) -> Any:
    """Return what is another value after an attribute of the owners, or of an object in them, has changed.

    It has numbers, text and the items of short lists and dictionaries as they are, and only the identity and
    the length of everything longer: the numbers of a large tensor may change without notice.
    """
    return _read(owners, _DEPTH, set())


def _read(value: Any, depth: int, seen: set[int]) -> Any:
    """Return the value of read_attributes() for one object. seen: the ids of objects that were read."""
    kind = type(value).__name__
    if isinstance(value, _PLAIN):
        return kind, value
    if isinstance(value, torch.Tensor | np.ndarray):
        if math.prod(value.shape) <= _FEW:
            with contextlib.suppress(Exception):  # a tensor without numbers of its own, such as a meta tensor
                return kind, repr(value.tolist())  # as text a NaN is equal to a NaN
        return kind, id(value)
    identity = (kind, id(value))
    if depth == 0 or id(value) in seen or isinstance(value, _WITHOUT):
        return identity
    seen.add(id(value))
    if isinstance(value, _CONTAINERS):
        if len(value) > _FEW:
            return *identity, len(value)
        # a new list of the same items is equal: its identity does not count
        identity = (kind, 0)
    if isinstance(value, set | frozenset):
        return kind, frozenset(value)
    parts: dict[Any, Any] = {}
    if isinstance(value, dict):
        parts = value
    elif isinstance(value, _LISTS):
        parts = dict(enumerate(value))
    else:
        with contextlib.suppress(Exception):  # it has no attributes, or its class decides what they are
            parts = vars(value)
    contents = []
    for name, part in list(parts.items()):  # a copy: a thread may change them meanwhile
        contents.append((_read(name, 0, seen), _read(part, depth - 1, seen)))
    return *identity, contents
