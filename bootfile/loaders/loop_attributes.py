"""The plain attributes of a data set that the loop changes between epochs, such as a counter of the epochs.

A checkpoint has their values, and a restart sets them again: numbers, text and None, in the data set and in
the objects that it holds. What reading an item changes does not count.
"""

import types
from typing import Any

import torch

_SAVED_DEPTH = 3  # attributes of attributes that a checkpoint has: those of a transform, of a Subset's data
SAVED = (bool, int, float, str, types.NoneType)
WITHOUT = (type, types.ModuleType, types.FunctionType, types.MethodType)  # their attributes do not count

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
    if not isinstance(attributes, dict) or isinstance(owner, (*WITHOUT, torch.Tensor)):
        return values
    for name, value in list(attributes.items()):  # a copy: a thread may change them meanwhile
        if type(value) in SAVED:
            values[path + name] = value
        elif depth > 1:
            values |= _read(value, depth - 1, f"{path}{name}.")
    return values
