"""The plain attributes of a data set that the loop changes between epochs, such as a counter of the epochs.

A checkpoint has their values, and a restart sets them again: numbers, text and None, in the data set and in
the objects that it holds. What reading an item changes does not count. Workers have a copy of the data set,
so they start again after any plain attribute has changed (read_attributes).
"""

import collections
import contextlib
import math
import types
from typing import Any

import numpy as np
import torch

_SAVED_DEPTH = 3  # attributes of attributes that a checkpoint has: those of a transform, of a Subset's data
_SAVED = (bool, int, float, str, types.NoneType)
_DEPTH = 6  # attributes of attributes that are compared
_PLAIN = (*_SAVED, complex, bytes, np.number, np.bool_)
_FEW = 16  # items of a list, or numbers of an array, that are compared one by one
_LISTS = (list, tuple, collections.deque)
_CONTAINERS = (*_LISTS, set, frozenset, dict)
_WITHOUT = (type, types.ModuleType, types.FunctionType, types.MethodType)  # their attributes do not count

Values = dict[str, Any]  # "rollout" or "transform.p" -> value


class LoopAttributes:
    """The attributes of `owner`, a data set, that the loop has changed; none if it is None. names: their
    paths. The training loader calls begin_epoch() before it reads the first batch of an epoch, and
    end_epoch() after the last one: what differs between them was changed by the loop."""

    def __init__(self, owner: Any):
        self.names: set[str] = set()
        self._owner = owner
        self._before: Values | None = None  # at the last end_epoch(); None: the training has not begun
        self._at_entry: Values | None = None  # before the body of the present epoch
        self._is_reading = False

    def begin_epoch(self) -> None:
        """Look for changes since the last epoch, or since the training began."""
        self._look()
        self._is_reading = True

    def end_epoch(self) -> None:
        """Note the present values, also when the training begins: what the program sets before is its own."""
        self._before = _read(self._owner)
        self._is_reading = False

    def enter_epoch(self) -> None:
        """Note the present values before the body of the loop runs for an epoch: a restart within the epoch
        runs it again from its beginning."""
        self._at_entry = _read(self._owner)

    def leave_epoch(self) -> None:
        """Note that the body of the loop has run to its end."""
        self._at_entry = None

    def state(self) -> Values:
        """Return the values that a restart sets, of the attributes that the loop has changed: those before
        the body of the present epoch or, between two epochs, the present ones."""
        self._look()
        if not self.names:
            return {}
        values = _read(self._owner) if self._at_entry is None else self._at_entry
        return {name: values[name] for name in sorted(self.names) if name in values}

    def _look(self) -> None:
        """Add the attributes that have changed since the last end_epoch() to `names`, unless an epoch is
        being read: then reading an item may have changed them."""
        if self._is_reading or self._before is None:
            return
        before = self._before
        present = _read(self._owner).items()
        self.names |= {
            name for name, value in present if name not in before or not _are_equal(before[name], value)
        }

    def restore(self, values: Values) -> None:
        """Set attributes to the values of a checkpoint. One whose object does not exist is left out."""
        for path, value in values.items():
            *objects, name = path.split(".")
            owner = self._owner
            for part in objects:
                owner = getattr(owner, part, None)
            if owner is not None:
                setattr(owner, name, value)
                self.names.add(path)


def _are_equal(first: Any, second: Any) -> bool:
    """Return whether two values are of one type and equal; a NaN is equal to a NaN."""
    return type(first) is type(second) and (first == second or (first != first and second != second))


def _read(owner: Any, depth: int = _SAVED_DEPTH, path: str = "") -> Values:
    """Return the plain attributes of an object and of the objects in it, by their paths."""
    values: Values = {}
    attributes = getattr(owner, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(owner, (*_WITHOUT, torch.Tensor)):
        return values
    for name, value in list(attributes.items()):  # a copy: a thread may change them meanwhile
        if type(value) in _SAVED:
            values[path + name] = value
        elif depth > 1:
            values |= _read(value, depth - 1, f"{path}{name}.")
    return values


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
    parts: Any = dict(enumerate(value)) if isinstance(value, _LISTS) else value
    if not isinstance(parts, dict):
        parts = {}
        with contextlib.suppress(Exception):  # it has no attributes, or its class decides what they are
            parts = vars(value)
    # a copy: a thread may change them meanwhile
    pairs = list(parts.items())
    return *identity, [(_read_value(key, 0, seen), _read_value(part, depth - 1, seen)) for key, part in pairs]
