"""The plain attributes of a data set and of the objects that it holds, to compare them.

Workers have a copy of the data set: they start again after an attribute has changed. A loop without workers
does not load this module.
"""

import collections
import contextlib
import math
from typing import Any

import numpy as np
import torch

from bootfile.loaders.loop_attributes import SAVED, WITHOUT

_DEPTH = 6  # attributes of attributes that are compared
_PLAIN = (*SAVED, complex, bytes, np.number, np.bool_)
_FEW = 16  # items of a list, or numbers of an array, that are compared one by one
_LISTS = (list, tuple, collections.deque)
_CONTAINERS = (*_LISTS, set, frozenset, dict)


def read_attributes(*owners: Any) -> Any:
    """Return what is another value after an attribute of the owners, or of an object in them, has changed. It
    has numbers, text and the items of short lists and dictionaries as they are, and only the identity and the
    length of everything longer: the numbers of a large tensor may change without notice."""
    return _read_value(owners, _DEPTH, set())


def _read_value(value: Any, depth: int, seen: set[int]) -> Any:
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
    if depth == 0 or id(value) in seen or isinstance(value, WITHOUT):
        return identity
    seen.add(id(value))
    if isinstance(value, _CONTAINERS):
        if len(value) > _FEW:
            return *identity, len(value)
        # a new list of the same items is equal: its identity does not count
        identity = (kind, 0)
    if isinstance(value, set | frozenset):
        return kind, frozenset(value)
    parts: Any = dict(enumerate(value)) if isinstance(value, _LISTS) else value
    if not isinstance(parts, dict):
        parts = {}
        with contextlib.suppress(Exception):  # it has no attributes, or its class decides what they are
            parts = vars(value)
    # a copy: a thread may change them meanwhile
    pairs = list(parts.items())
    return *identity, [(_read_value(key, 0, seen), _read_value(part, depth - 1, seen)) for key, part in pairs]
