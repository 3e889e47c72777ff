"""Read the files of weights that a script has written, and name what differs in those of two runs."""

import hashlib
import importlib
import operator
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from bootfile.exact import checked_files, digest, files
from bootfile.exact.kinds import COUNTER, OTHER, RANDOM, find_kind
from bootfile.ground.errors import BadInput

_TORCH_STATES = (16, 5048, 5056)  # bytes of torch.get_rng_state() of a GPU and of a CPU
_PYTHON_STATE = 625  # numbers in random.getstate()
_OPTIMIZER = {"state", "param_groups"}  # the keys of the state of an optimizer


class Part(NamedTuple):
    """A tensor or a number in a file. kind: as in kinds.py. number: its value; None for a tensor."""

    digest: str
    kind: int
    number: bool | int | float | None


class Difference(NamedTuple):
    """A part that differs. file: its path in the folder of a run. first, second: None if a run lacks it."""

    file: str
    name: str
    first: Part | None
    second: Part | None

    @property
    def kind(self) -> int:
        return min([OTHER, *(part.kind for part in (self.first, self.second) if part)])

    @property
    def is_number(self) -> bool:
        """Return whether it is a number in one of the runs, and no tensor."""
        return any(part and part.number is not None for part in (self.first, self.second))

    @property
    def text(self) -> str:
        """Return the name, and both values of a number."""
        if not self.first or not self.second:
            return f"{self.name} (only one run has it)"
        numbers = self.first.number, self.second.number
        return self.name if None in numbers else f"{self.name} ({describe_numbers(*numbers)})"


def describe_numbers(value: object, other: object, before_other: str = "") -> str:
    """Return two values in words, with as few digits as show their difference."""
    short = [f"{number:.6g}" if isinstance(number, float) else str(number) for number in (value, other)]
    first, second = short if short[0] != short[1] else (str(value), str(other))
    return f"{first}, {before_other}{second}"


def load(path: str) -> dict[str, Any]:
    """Return the dictionary in a file of torch.save; nothing in it is executed. Raises files.Refused.

    Arrays and numbers of NumPy are read: many scripts save np.random.get_state().
    """
    # prove calls it for the files of a script that it has run: they may still be damaged by a kill
    with _numpy_is_allowed():
        return checked_files.load(path)


def read_parts(path: str) -> dict[str, Part]:
    """Return the tensors and numbers in a file of weights by their names. Raises BadInput."""
    try:
        state = load(path)
    except files.Refused as reason:
        raise BadInput(f"{path} cannot be compared: {reason}") from reason
    values = dict(digest.leaves(_shorten(state)))
    return {
        name: Part(text, _find_kind(name, values[name]), _read_number(values[name]))
        for name, text in digest.summarize(0, values)["parts"].items()
    }


def read_progress(path: str) -> set[str]:
    """Return the digests of the tensors in a file of weights, and of its counters with their names: training
    changes some of them. Raises BadInput."""
    parts = read_parts(path)
    counters = {f"{name} {part.digest}" for name, part in parts.items() if part.kind == COUNTER}
    return counters | {part.digest for part in parts.values() if part.kind == OTHER and part.number is None}


def find_differences(first: str, second: str, names: list[str]) -> list[Difference]:
    """Return what differs in the files of two runs: possible causes before effects. first, second: their
    folders. names: the paths of the files below both. Raises BadInput."""
    differences = []
    for file in names:
        # one file is in memory at a time: only its digests are kept
        before, after = read_parts(os.path.join(first, file)), read_parts(os.path.join(second, file))
        digests = [{(name, part.digest) for name, part in parts.items()} for parts in (before, after)]
        other = sorted({name for name, _ in digests[0] ^ digests[1]})
        differences += [Difference(file, name, before.get(name), after.get(name)) for name in other]
    # files and names keep their order within a kind
    return sorted(differences, key=operator.attrgetter("kind"))


def describe(differences: list[Difference]) -> str:
    """Return the first of some differences, and how many more its file has."""
    first = differences[0]
    text = f"{first.file} differs: {first.text}"
    others = sum(difference.file == first.file for difference in differences[1:])
    return f"{text}, and {others} more" if others else text


class _Random(str):
    """A leaf in the place of a state of random numbers: its digest."""


def _numpy_is_allowed() -> AbstractContextManager[Any]:
    """Return a context in which torch.load(weights_only=True) reads arrays of NumPy. torch before 2.5 has no
    such context: it refuses them."""
    allow = getattr(torch.serialization, "safe_globals", lambda names: nullcontext())
    core = "_core" if hasattr(np, "_core") else "core"  # NumPy 2
    multiarray: Any = importlib.import_module(f"numpy.{core}.multiarray")
    dtypes: Any = getattr(np, "dtypes", None)  # NumPy 1.25 and later
    known = [getattr(dtypes, name) for name in getattr(dtypes, "__all__", ())]
    context: AbstractContextManager[Any] = allow(
        [multiarray._reconstruct, multiarray.scalar, np.ndarray, np.dtype, *known]
    )
    return context


def _shorten(value: Any) -> Any:
    """Return an object of a checkpoint with one leaf for each array, and for each state of random numbers of
    Python or NumPy. digest.py would cut the text of a long array."""
    if isinstance(value, dict):
        whole = {key: _shorten(part) for key, part in value.items()}
        for key, part in value.items():
            if isinstance(part, dict) and part.keys() >= _OPTIMIZER:
                # digest.leaves() leaves out what an optimizer has in addition, as Lookahead its slow weights
                whole |= {f"{key}.{name}": _shorten(part[name]) for name in part.keys() - _OPTIMIZER}
        return whole
    if isinstance(value, np.ndarray):
        content = value.tobytes()
        return f"{value.dtype} {value.shape} {hashlib.blake2b(content, digest_size=16).hexdigest()}"
    if not isinstance(value, list | tuple):
        return value
    # random.getstate() and numpy.random.get_state(), by their shape: files do not name them
    is_python = len(value) == 3 and isinstance(value[1], list | tuple) and len(value[1]) == _PYTHON_STATE
    parts = [_shorten(part) for part in value]
    return _Random(parts) if is_python or value[:1] == ["MT19937"] or value[:1] == ("MT19937",) else parts


def _find_kind(name: str, value: Any) -> int:
    kind = find_kind(name)
    # torch.get_rng_state(), or that of a generator
    is_state = isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.dim() == 1
    if kind == OTHER and (isinstance(value, _Random) or (is_state and len(value) in _TORCH_STATES)):
        return RANDOM
    return COUNTER if kind == OTHER and isinstance(value, int) else kind


def _read_number(value: Any) -> bool | int | float | None:
    """Return the number that a value is, None for other values."""
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_meta:
        value = value.item()
    return value if isinstance(value, bool | int | float) else None
