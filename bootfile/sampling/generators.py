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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

BATCH, EPOCH_START, EPOCH_END = range(3)  # the moments that have numbers of their own
_MT19937 = 625 * 4  # bytes of the state of NumPy's global generator: 624 words and a position
_DEPTH = 6  # attributes of attributes that are searched
_NAME = 40  # characters of an attribute or a key in a path
_DATA = 100  # items of a list or a dictionary that is data, and is not searched
# the generators that seed_all() seeds
_GLOBAL = (torch.default_generator, random._inst, np.random.mtrand._rand)
_LEAVES = (types.ModuleType, type, np.ndarray, torch.Tensor, str, bytes)  # hold no generators
_LISTS = (list, tuple, set, frozenset, collections.deque)
_OF_LIBRARIES = {"builtins", "collections", "functools", "torch", "numpy", "typing", "abc", "types"}

_leader: weakref.ref[Any] | None = None  # the object of lead()


def lead(owner: object) -> None:
    """Let one object seed the global generators of this process from now on, as long as it exists.
    Loader.lead() calls it for the loader of the training, on each rank. Other loaders ask may_seed()."""
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
    words = struct.pack("<4Q", seed, rank, step, moment)
    digest = hashlib.blake2b(words, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators of torch, NumPy and `random`, and that of the device. seed: 0..2^64-1; NumPy
    and torch on the CPU use its lower 32 bits. The host does not wait for the device, and a CUDA graph reads
    the new seed when it is replayed. Other GPUs of this process (DataParallel) get other seeds."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() would remember each call for CUDA
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    if device is None or device.type == "cpu":
        return
    module = getattr(torch, device.type)
    if not hasattr(module, "default_generators"):  # such as torch.mps
        module.manual_seed(seed)
        return
    first = module.current_device() if device.index is None else device.index
    for index, generator in enumerate(module.default_generators):
        generator.manual_seed((seed + index - first) % 2**64)


def snapshot() -> tuple[Any, ...]:
    """Return the states of the global generators, for comparison. NumPy's get_state() would take 30 us."""
    # the bytes where NumPy keeps them: this may run twice for each batch
    state = np.random.get_bit_generator().ctypes.state_address  # type: ignore[attr-defined]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), ctypes.string_at(state, _MT19937)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore the states of the global generators at the end of the context."""
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def find_generators(owner: Any, name: str = "") -> list[Generator]:
    """Return the generators which an object holds. name: the first part of their paths. Generators are
    torch.Generator, numpy.random.Generator and RandomState, random.Random, and objects with
    set_random_seed(), such as Albumentations' pipelines."""
    return [Generator(path, value, seed) for path, value, seed in search(owner, name, seed_function)]


def search(
    owner: Any, name: str, pick: Callable[[Any], Any], most: int = _DEPTH
) -> list[tuple[str, Any, Any]]:
    """Return (path, value, pick(value)) of each value which an object holds and for which pick() is true.

    name: the first part of the paths. Values are searched in attributes, modules, lists and dictionaries, in
    the objects to which functions and __getitem__ refer, and in what functools.cache keeps. most: attributes
    of attributes. A value whose own methods fail is left out.
    """
    results: list[tuple[str, Any, Any]] = []
    depths: dict[int, int] = {}  # id of a value -> the least depth at which it was reached
    waiting: list[tuple[str, Any, int]] = [(name, owner, 0)]
    while waiting:
        path, value, depth = waiting.pop()
        is_new = id(value) not in depths
        # a value that was reached at a greater depth is searched again: more of its parts are near enough now
        if depth > min(most, depths.get(id(value), most + 1) - 1):
            continue
        depths[id(value)] = depth
        if isinstance(value, _LEAVES) or any(value is generator for generator in _GLOBAL):
            continue
        with contextlib.suppress(Exception):
            picked = pick(value)
            if picked and is_new:
                results.append((path, value, picked))
            for part, child in [] if picked else _parts(value):
                # a tree of modules has any depth
                is_in_tree = isinstance(value, torch.nn.Module) and isinstance(child, torch.nn.Module)
                waiting.append((f"{path}.{part[:_NAME]}".strip("."), child, depth + (not is_in_tree)))
    return results


def seed_with(seed: int, held: Sequence[Generator]) -> None:
    """Seed all generators of this process, and those that a loader holds, each in another way: with one seed
    they would all draw the same numbers. seed: 0..2^64-1."""
    seed_all(seed)
    for place, generator in enumerate(held, 1):
        generator.seed((seed + place) % 2**63)


def seed_function(value: Any) -> Callable[[int], object] | None:
    """Return the function that seeds a generator; None if the value is not a generator."""
    if isinstance(value, torch.Generator):
        return value.manual_seed
    if isinstance(value, random.Random):
        return value.seed
    if isinstance(value, np.random.Generator):
        return functools.partial(_seed_bits, value.bit_generator)
    seed: Any = None
    if isinstance(value, np.random.RandomState):
        seed = value.seed
    elif callable(getattr(type(value), "set_random_seed", None)):  # not of an object that has any attribute
        seed = value.set_random_seed
    return functools.partial(_call_with_32_bits, seed) if seed else None


def _seed_bits(bits: Any, seed: int) -> None:
    """Seed the bit generator of a numpy.random.Generator, which has no function for it."""
    bits.state = type(bits)(seed).state


def _call_with_32_bits(function: Callable[[int], object], seed: int) -> None:
    """Seed a generator whose seeds have 32 bits."""
    function(seed & 0xFFFFFFFF)


def _names(code: types.CodeType) -> list[str]:
    """Return the names that a function uses, also in its comprehensions and lambdas."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [*code.co_names, *(name for part in inner for name in _names(part))]


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return the names and the objects to which a value refers and that may hold a generator."""
    if isinstance(value, functools.partial):
        return [("func", value.func), *_parts(value.args), *_parts(value.keywords)]
    # what a cache keeps is in no attribute: only the garbage collector knows it
    if isinstance(value, functools._lru_cache_wrapper):
        return [("", referent) for referent in gc.get_referents(value)]
    if isinstance(value, types.MethodType):
        return [("", value.__self__), ("", value.__func__)]
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    parts = _items_of(value)
    for kind in type(value).__mro__:
        if kind.__module__.partition(".")[0] not in _OF_LIBRARIES:
            parts = _parts_of_class(kind, value) | parts
    # after the classes: an attribute of the object takes the place of theirs
    parts |= getattr(value, "__dict__", {})
    if isinstance(value, torch.nn.Module):  # its submodules are parts by their own names
        parts |= parts.pop("_modules", {})
    # the name of a function is not a part of a path
    functions = (types.FunctionType, types.MethodType)
    return [("" if isinstance(part, functions) else name, part) for name, part in parts.items()]


def _parts_of_function(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return what a function refers to: variables of functions around it, defaults, and global names. [] for
    a function of torch."""
    if (function.__module__ or "").startswith("torch."):
        return []
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    # an empty cell has no cell_contents
    parts = [(name, cell.cell_contents) for name, cell in cells if cell != types.CellType()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    parts += [("", default) for default in defaults]
    return parts + [(name, function.__globals__.get(name)) for name in _names(function.__code__)]


def _items_of(value: Any) -> dict[str, Any]:
    """Return the items of a list, a set or a dictionary by their names in a path; {} if it is data, or if the
    value is another one."""
    if not isinstance(value, (*_LISTS, dict)) or len(value) >= _DATA:
        return {}
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    # the text of a tensor, which may be a key, takes milliseconds
    names = [
        str(key) if isinstance(key, str | int) else f"{type(key).__name__} {place}"
        for place, (key, _) in enumerate(items)
    ]
    return dict(zip(names, [item for _, item in items], strict=True))


def _parts_of_class(kind: type, value: Any) -> dict[str, Any]:
    """Return the attributes, methods and slots that one of the user's own classes gives to a value."""
    members = vars(kind)
    parts = {name: part for name, part in members.items() if not name.startswith("__")}
    # after the others: the order of the generators decides how each is seeded
    parts |= {name: members[name] for name in ("__getitem__", "__call__") if name in members}
    slots = [name for name, part in parts.items() if isinstance(part, types.MemberDescriptorType)]
    return parts | {name: getattr(value, name, None) for name in slots}
