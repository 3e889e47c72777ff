"""Seed random number generators: what a step draws is a function of (seed, step, rank).

A Loader seeds them when it hands out a batch, at the start of an epoch and at its end. So dropout, mixup and
noise do not depend on earlier steps, and a checkpoint needs no state of a generator.
"""

import collections
import contextlib
import ctypes
import functools
import gc
import hashlib
import random
import struct
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

BATCH, EPOCH_START, EPOCH_END = range(3)  # the moments that have numbers of their own
_MT19937 = 625 * 4  # bytes of the state of NumPy's global generator: 624 words and a position
_DEPTH = 6  # attributes of attributes that are searched
_NAME = 40  # characters of an attribute or a key in a path
_DATA = 100  # items of a list or a dictionary that is data, and is not searched
# seed_all() seeds them
_GLOBAL = (torch.default_generator, random._inst, np.random.mtrand._rand)
_OF_LIBRARIES = {"builtins", "collections", "functools", "torch", "numpy", "typing", "abc", "types"}


_leader: weakref.ref[Any] | None = None  # the object of lead()


def lead(owner: object) -> None:
    """Let one object seed the global generators of this process from now on, as long as it exists: the loader
    of the training. Other loaders ask may_seed()."""
    global _leader
    _leader = weakref.ref(owner)


def leads(owner: object) -> bool:
    """Return whether lead() was called with this object, and with no other one since."""
    return _leader is not None and _leader() is owner


def may_seed(owner: object) -> bool:
    """Return whether an object may seed the global generators: it leads, or no object does."""
    return _leader is None or _leader() in (None, owner)


class Generator(NamedTuple):
    """A generator that an object holds. path: where, for example "model.noise.generator"."""

    path: str
    value: Any
    seed: Callable[[int], object]


def derive_seed(seed: int, rank: int, step: int, moment: int = BATCH) -> int:
    """Return the seed of a moment of a run, 0..2^64-1. Source: BLAKE2b, RFC 7693."""
    digest = hashlib.blake2b(struct.pack("<4Q", seed, rank, step, moment), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators of torch, NumPy and `random`, and that of the device.

    seed: 0..2^64-1; NumPy and torch on the CPU use its lower 32 bits. The host does not wait for the device,
    and a CUDA graph reads the new seed when it is replayed. Other GPUs of this process (DataParallel) get
    other seeds.
    """
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() would remember each call for CUDA
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    if device is None or device.type == "cpu":
        return
    module = getattr(torch, device.type)
    if not hasattr(module, "default_generators"):
        module.manual_seed(seed)
        return
    first = module.current_device() if device.index is None else device.index
    for index, generator in enumerate(module.default_generators):
        generator.manual_seed((seed + index - first) % 2**64)


def snapshot() -> tuple[Any, ...]:
    """Return the states of the global generators, for comparison. NumPy's get_state() would take 30 us."""
    state = np.random.get_bit_generator().ctypes.state_address  # type: ignore[attr-defined]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), ctypes.string_at(state, _MT19937)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore the states of the global generators at the end of the context."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def find_generators(owner: Any, name: str = "") -> list[Generator]:
    """Return the generators which an object holds. name: the first part of their paths.

    Generators are torch.Generator, numpy.random.Generator and RandomState, random.Random, and objects with
    set_random_seed(), such as Albumentations' pipelines.
    """
    return [Generator(*found) for found in search(owner, name, seed_function)]


def search(
    owner: Any, name: str, pick: Callable[[Any], Any], most: int = _DEPTH
) -> list[tuple[str, Any, Any]]:
    """Return (path, value, pick(value)) of each value which an object holds and for which pick() is true.

    name: the first part of the paths. Values are searched in attributes, modules, lists and dictionaries, in
    the objects to which functions and __getitem__ refer, and in what functools.cache keeps. most: attributes
    of attributes.
    """
    results: list[tuple[str, Any, Any]] = []
    seen: dict[int, int] = {}  # id of a value -> the least depth at which it was reached
    waiting: list[tuple[str, Any, int]] = [(name, owner, 0)]
    while waiting:
        path, value, depth = waiting.pop()
        if depth > most or seen.get(id(value), depth + 1) <= depth:
            continue
        is_new, seen[id(value)] = id(value) not in seen, depth
        if isinstance(value, types.ModuleType | type | np.ndarray | torch.Tensor | str | bytes):
            continue
        if any(value is each for each in _GLOBAL):
            continue
        try:
            if picked := pick(value):
                results += [(path, value, picked)] * is_new
                continue
            parts = list(_parts(value))
        except Exception:  # the object's own methods may fail
            continue
        for part, each in parts:
            own = isinstance(value, torch.nn.Module) and isinstance(each, torch.nn.Module)
            waiting.append((f"{path}.{part[:_NAME]}".strip("."), each, 0 if own else depth + 1))
    return results


def seed_function(value: Any) -> Callable[[int], object] | None:
    """Return the function that seeds a generator; None if the value is not a generator."""
    if isinstance(value, torch.Generator):
        return value.manual_seed
    if isinstance(value, random.Random):
        return value.seed
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda seed: setattr(bits, "state", type(bits)(seed).state)
    if isinstance(value, np.random.RandomState):
        return lambda seed: value.seed(seed & 0xFFFFFFFF)
    if callable(getattr(type(value), "set_random_seed", None)):  # not of an object that has any attribute
        return lambda seed: value.set_random_seed(seed & 0xFFFFFFFF)
    return None


def _names(code: types.CodeType) -> list[str]:
    """Return the names that a function uses, also in its comprehensions and lambdas."""
    inner = [name for each in code.co_consts if isinstance(each, types.CodeType) for name in _names(each)]
    return [*code.co_names, *inner]


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """Return the names and the objects to which a value refers and that may hold a generator."""
    parts: dict[str, Any] = {}
    if isinstance(value, list | tuple | set | frozenset | collections.deque | dict) and len(value) < _DATA:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        # the text of a tensor, which may be a key, takes milliseconds
        parts = {
            str(key) if isinstance(key, str | int) else f"{type(key).__name__} {place}": each
            for place, (key, each) in enumerate(items)
        }
    if isinstance(value, functools.partial):
        return [("func", value.func), *_parts(value.args), *_parts(value.keywords)]
    if isinstance(value, functools._lru_cache_wrapper):
        return [("", each) for each in gc.get_referents(value)]
    if isinstance(value, types.MethodType):
        return [("", value.__self__), ("", value.__func__)]
    if isinstance(value, types.FunctionType):
        if value.__module__ and value.__module__.startswith("torch."):
            return []
        names = value.__code__.co_freevars
        cells = [
            (name, cell.cell_contents)
            for name, cell in zip(names, value.__closure__ or (), strict=True)
            if cell != types.CellType()  # an empty one has no cell_contents
        ]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        cells += [("", each) for each in defaults]
        return cells + [(name, value.__globals__.get(name)) for name in _names(value.__code__)]
    for kind in type(value).__mro__:  # class attributes, methods and slots of the user's own classes
        if kind.__module__.partition(".")[0] in _OF_LIBRARIES:
            continue
        of_kind = {name: each for name, each in vars(kind).items() if not name.startswith("__")}
        methods = {name: vars(kind)[name] for name in ("__getitem__", "__call__") if name in vars(kind)}
        slots = [name for name, each in of_kind.items() if isinstance(each, types.MemberDescriptorType)]
        parts = of_kind | methods | {name: getattr(value, name, None) for name in slots} | parts
    parts |= getattr(value, "__dict__", {})
    parts |= parts.pop("_modules", {}) if isinstance(value, torch.nn.Module) else {}
    hidden = (types.FunctionType, types.MethodType)  # a function's name is not a part of a path
    return [("" if isinstance(each, hidden) else name, each) for name, each in parts.items()]
