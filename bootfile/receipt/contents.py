"""Hash the samples of a batch by their ids, or by their contents."""

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from bootfile.ground.errors import BadInput
from bootfile.ground.mixing import mix, to_words

_LINES = 64  # parts of a tensor that are hashed
_LINE = 64  # bytes of such a part
_NOT_IN_NUMPY = (torch.bfloat16, torch.complex32)  # nor are some types of one byte
_ADVICE = "it cannot be hashed: give ids"
_NONE = -1  # no length is this one


def hash_ids(ids: Any) -> np.ndarray:
    """Return a hash of each id, uint64 [n]. ids: integers (tensor, array or list) or strings."""
    if isinstance(ids, torch.Tensor):
        ids = ids.cpu()  # waits for the GPU, if the loop has moved them already
    array = np.asarray(ids)
    if array.dtype.kind in "iu":
        return mix(array.reshape(-1).astype(np.uint64))
    return np.array([_hash_text(text) for text in ids], np.uint64)


def hash_batch(batch: Any) -> np.ndarray:
    """Return a hash of the content of each sample, uint64 [n].

    batch: tensors, arrays, numbers and strings in nested dictionaries, lists and tuples. The number of
    samples is the first dimension, or the length, that most parts have. Other parts count for each sample.
    Raises BadInput if a part is of another type.
    """
    count = next(iter(_sizes(batch)), 1)
    hashes: np.ndarray = _hash(batch, count) + np.zeros(count, np.uint64)  # also if all have one
    return hashes


def _sizes(value: Any) -> list[int]:
    """Return the possible numbers of samples in a part of a batch, the most likely one first."""
    if isinstance(value, torch.Tensor):
        return [value.size(0)] if value.ndim else []  # a scalar counts for each sample
    if isinstance(value, np.ndarray):
        return list(value.shape[:1])
    if not isinstance(value, Mapping | list | tuple):
        return []
    parts = list(value.values()) if isinstance(value, Mapping) else list(value)
    # a part with a name is not a sample
    lengths = [] if isinstance(value, Mapping) or hasattr(value, "_fields") else [len(parts)]
    if isinstance(value, list) and all(isinstance(part, str | Mapping | tuple) for part in parts):
        return lengths  # a list of samples
    times = Counter(size for part in parts for size in _sizes(part))
    # in the order of the parts: equally likely sizes keep it
    return [size for size in times if times[size] == max(times.values())] + lengths


def _hash(value: Any, count: int) -> np.ndarray:
    """Return the hashes of `count` samples, uint64 [count], or one hash [1] of a value that all samples have.
    count: _NONE if the value is one sample, of which no part has samples. hash_batch() calls it with a batch,
    and it calls itself with the parts."""
    if not isinstance(value, torch.Tensor) and hasattr(value, "__array_interface__"):
        array = np.array(value)  # NumPy's arrays and numbers, images of PIL
        try:
            value = torch.from_numpy(array)
        except (TypeError, ValueError):  # texts, objects, another order of bytes
            value = array.tolist()
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_nested:
            raise BadInput(f"a batch holds a sparse or nested tensor ({value.layout}): {_ADVICE}")
        has_samples = value.ndim > 0 and len(value) == count
        return _hash_rows(value if has_samples else value[None])  # one row counts for each sample
    if isinstance(value, Mapping):
        parts = [part for key in sorted(value, key=repr) for part in (key, value[key])]
    elif isinstance(value, list | tuple):
        parts = list(value)
        if len(parts) == count and not any(count in _sizes(part) for part in parts):  # a list of samples
            return np.concatenate([_hash(part, _NONE) for part in parts])
    elif isinstance(value, str | bytes | int | float | complex | None):
        return np.array([_hash_text(value)], np.uint64)
    else:
        raise BadInput(f"a batch holds a {type(value).__name__}: {_ADVICE}")
    # the number of parts is hashed, too: [[a], [b]] is not [a, b]
    hashes = _hash_length(len(parts))
    for part in parts:
        hashes = mix(hashes ^ _hash(part, count))
    return hashes


def _hash_rows(rows: torch.Tensor) -> np.ndarray:
    """Return a hash of each row of a tensor [n, ...], uint64 [n]."""
    rows = rows.detach()
    count = math.prod(rows.shape[1:])
    starts, length = _lines(count, rows.element_size())
    if rows.is_contiguous() or rows.ndim == 1:
        chosen = rows.reshape(len(rows), count)
        if len(starts) > 1:
            chosen = torch.cat([chosen[:, start : start + length] for start in starts], 1)
    else:  # elements in the order of the indices too, without a copy of the whole tensor
        places = np.add.outer(starts, np.arange(length)).reshape(-1)
        offsets = np.dot(rows.stride()[1:], np.unravel_index(places, tuple(rows.shape[1:])))
        flat = rows.as_strided((len(rows), int(offsets.max()) + 1), (rows.stride(0), 1))
        chosen = flat.index_select(1, torch.from_numpy(offsets).to(rows.device))
    if chosen.dtype in _NOT_IN_NUMPY or chosen.element_size() == 1:
        chosen = chosen.contiguous().view(torch.uint8)
    # the calls cost more than the bytes of a small batch, and NumPy's are shorter than torch's
    words = to_words(np.ascontiguousarray(chosen.numpy(force=True)).view(np.uint8))
    kind = _hash_kind(rows.dtype, rows.shape[1:])
    return mix(np.einsum("ij,j->i", words, _keys(words.shape[1])) ^ kind)


@functools.lru_cache(maxsize=64)
def _hash_kind(dtype: torch.dtype, shape: torch.Size) -> np.uint64:
    """Return a hash of type and shape: zeros of two shapes are not the same sample."""
    kind: np.uint64 = np.uint64(_hash_text(f"{dtype} {list(shape)}"))
    return kind


@functools.lru_cache(maxsize=64)
def _hash_length(parts: int) -> np.ndarray:
    return mix(np.array([parts], np.uint64))


@functools.lru_cache(maxsize=64)
def _keys(count: int) -> np.ndarray:
    """Return an odd number for each place of a word: words that are exchanged give another hash."""
    keys: np.ndarray = mix(np.arange(count, dtype=np.uint64)) | np.uint64(1)
    return keys


def _lines(count: int, size: int) -> tuple[list[int], int]:
    """Return the first elements of the lines that are hashed, and their length. size: bytes of an element."""
    length = _LINE // size
    if count <= _LINES * length:
        return [0], count
    return np.linspace(0, count - length, _LINES).astype(np.int64).tolist(), length


def _hash_text(value: Any) -> int:
    text = repr(value.item() if isinstance(value, np.generic) else value)  # NumPy 2 writes np.str_('a')
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
