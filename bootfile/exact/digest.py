"""The digest of a run's state: weights, buffers and the state of optimizers, equal for equal bits.

    FOLDER/state.jsonl    {"step": 44, "format": 2, "digest": "9f3c...",
                           "parts": {"model.fc.weight": "1d22c0ab", ...}}

There is a line for each checkpoint and each epoch. The digest does not depend on the device, the memory
format or the number of processes. It has the numbers of an optimizer's parameter groups, such as the learning
rate. Version 0.25 and earlier wrote no format, and hashed the bits of a tensor in another way.
"""

import functools
import hashlib
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from bootfile.exact import dtensors
from bootfile.exact.optimizer_steps import without_kernels
from bootfile.ground.mixing import mix
from bootfile.processes import ranks

FORMAT = 2  # digests of other formats cannot be compared
_WORDS = 2**13  # words of 8 bytes in a block
_BLOCK = 8 * _WORDS
_WITHOUT = {"receipt"}  # objects of a checkpoint that are not state of the model


def leaves(objects: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values in the objects of a checkpoint, for example "model.fc.weight"."""
    for name, value in objects.items():
        if name not in _WITHOUT:
            yield from _leaves(name, value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        if value.keys() >= {"state", "param_groups"}:  # the state of an optimizer
            groups = [without_kernels(group) for group in value["param_groups"]]
            value = {"state": value["state"], "param_groups": groups}
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    else:
        yield name, value
        return
    for key, part in parts:
        yield from _leaves(f"{name}.{key}", part)


def summarize(step: int, objects: dict[str, Any], is_alone: bool = False) -> dict[str, Any]:
    """Return a line of state.jsonl with the digests of the objects of a checkpoint.
    If they are sharded, call it on every rank: one all_reduce adds the sums of their parts. Otherwise the
        line of rank 0 is right. is_alone: only this rank calls it, and its line is right.
    """
    parts = {}
    whole = hashlib.blake2b(digest_size=8)
    named = sorted(leaves(objects), key=operator.itemgetter(0))
    # one all_reduce for all tensors of a sharded model: each rank adds the bytes of its parts
    tensors = [value for _, value in named if isinstance(value, torch.Tensor)]
    sums = iter(_add_tensors(tensors, is_alone))
    for name, value in named:
        if isinstance(value, torch.Tensor):
            text = f"{value.dtype} {list(value.shape)} {next(sums)}"
        elif isinstance(value, set):  # its order differs from process to process
            text = repr(sorted(value, key=repr))
        else:
            text = repr(value.item() if isinstance(value, np.generic) else value)  # as a checkpoint has it
        # a short digest for each part names what differs; the whole line has one that decides
        digest = hashlib.blake2b(text.encode(), digest_size=16)
        parts[name] = digest.hexdigest()[:8]
        whole.update(f"{name}\0".encode() + digest.digest())
    return {"step": step, "format": FORMAT, "digest": whole.hexdigest(), "parts": parts}


def _add_tensors(tensors: list[torch.Tensor], is_alone: bool = False) -> list[int]:
    """Return the sum of the bytes of each tensor, of all ranks together. is_alone: see summarize()."""
    if not tensors:
        return []
    # one collective for all tensors, on the device with which the ranks communicate
    sharded: Any = next(filter(dtensors.is_dtensor, tensors), None)
    device = tensors[0].device if sharded is None else torch.device(sharded.device_mesh.device_type)
    sums = []
    for tensor in tensors:
        # each element is counted on one rank
        part, start = (tensor, 0) if is_alone else _own_part(tensor)
        part = part.detach()
        if part.layout != torch.strided:  # sparse
            part = part.to_dense()
        part = part.resolve_conj().resolve_neg()  # views that are computed when they are read
        content = part.contiguous().reshape(-1).view(torch.uint8)
        sums.append(add_bytes(content, start * part.element_size()).to(device))
    added = torch.cat(sums)
    if sharded is not None:
        added = ranks.total(added, device)
    return added.tolist()


def _own_part(tensor: Any) -> tuple[torch.Tensor, int]:
    """Return the elements that this rank has to count, and the place of the first one in the whole tensor.
    The parts of all ranks make the whole. Call it on every rank.
    These are the rank's own elements (none of a replica) if the first dimension is sharded once; otherwise
        rank 0 gets the whole tensor.
    """
    # a whole tensor is on all ranks: rank 0 counts it, the others add nothing
    if not dtensors.is_dtensor(tensor):
        return (tensor, 0) if ranks.is_first() else (tensor.reshape(-1)[:0], 0)
    # several dimensions of the mesh: those that hold replicas have the same elements
    mesh = tensor.device_mesh
    rows = tensor.shape[0] if tensor.ndim else 0
    sharded = [place for place, kind in enumerate(tensor.placements) if not kind.is_replicate()]
    if len(sharded) != 1 or not tensor.placements[sharded[0]].is_shard(0):
        # a collective, which every rank of the mesh calls: the placements are the same on all
        return _own_part(dtensors.full(tensor))
    has_replica = any(mesh.get_local_rank(place) for place in range(mesh.ndim) if place not in sharded)
    shard = -(-rows // mesh.size(sharded[0]))  # rows of a part; the last ones may be shorter, or empty
    first = min(mesh.get_local_rank(sharded[0]) * shard, rows)
    part = dtensors.local(tensor)
    if has_replica:  # another rank counts these elements
        part = part[:0]
    return part, first * (tensor.numel() // max(rows, 1))


def add_bytes(content: Any, start: int = 0) -> torch.Tensor:
    """Return the sum of bytes, each times a number that depends on its place, modulo 2^64: int64 [1].

    The sum of a whole is that of its parts, wherever they are cut, so ranks add parts. Each word of 4 bytes
    is multiplied by an odd number: one other word is another sum, and several other words have the same sum
    with a probability of 2^-32 or less (multilinear hashing; Lemire and Kaser 2014, arXiv:1202.4961).

    content: uint8 [n], an array, or a tensor on any device. start: the place of its first byte in the whole.
    """
    if isinstance(content, torch.Tensor) and content.device.type == "cpu":
        content = content.numpy()  # NumPy multiplies int64 twice as fast as torch
    added: Any = 0
    first = min(-start % _BLOCK, len(content))  # a part of a block; whole blocks follow, and a part of one
    last = first + (len(content) - first) // _BLOCK * _BLOCK
    # three pieces: the numbers depend on the place in the whole, and a part may begin within a block
    for begin, end in ((0, first), (first, last), (last, len(content))):
        if begin < end:
            block, offset = divmod(start + begin, _BLOCK)
            words = _words(content[begin:end], offset % 8, -(start + end) % 8)
            added += _add_words(words.reshape(max((end - begin) // _BLOCK, 1), -1), block, offset // 8)
    return torch.as_tensor(added).reshape(1)


def _words(content: Any, before: int, after: int) -> Any:
    """Return bytes as int64 [n], with zeros before and after them."""
    if isinstance(content, np.ndarray):
        if before or after:
            content = np.pad(content, (before, after))
        return content.view(np.int64)
    if before or after or content.storage_offset() % 8:
        content = torch.nn.functional.pad(content, (before, after))
    return content.view(torch.int64)


def _add_words(blocks: Any, block: int, word: int) -> Any:
    """Return the sum of blocks of words, or of a part of one: int64 []. block, word: where they begin."""
    is_array = isinstance(blocks, np.ndarray)
    sums = []
    device = torch.device("cpu") if is_array else blocks.device
    most = 16 if is_array else 512  # blocks at a time: on a CPU they fit in its cache
    # every block has the same numbers; a factor for each block makes their order count
    low, high = (numbers[word : word + blocks.shape[1]] for numbers in _keys(device))
    # the same memory for the upper halves of all blocks: new memory costs more than the shift
    upper = np.empty((min(most, len(blocks)), blocks.shape[1]), np.int64) if is_array else None
    for first in range(0, len(blocks), most):
        words = blocks[first : first + most]
        halves = words >> 32 if upper is None else np.right_shift(words, 32, out=upper[: len(words)])
        # the upper half of a word has another number: its highest bit counts
        sums.append(_multiply(halves, high) + _multiply(words, low))
    whole = np.concatenate(sums) if is_array else torch.cat(sums)
    return torch.as_tensor(whole * _factors(block, len(blocks), device)).sum()


def _multiply(words: Any, numbers: Any) -> Any:
    """Return the scalar product of each row with the numbers: int64 [len(words)]."""
    if isinstance(words, np.ndarray):
        return np.einsum("ij,j->i", words, numbers)  # in one pass, without the products in memory
    return (words * numbers).sum(1)


@functools.cache
def _keys(device: torch.device) -> list[Any]:
    """Return the numbers for the words of a block: for each word, and for its upper half."""
    return [_odd(np.arange(first, 2 * _WORDS, 2), device) for first in (0, 1)]


@functools.lru_cache(64)
def _factors(block: int, count: int, device: torch.device) -> Any:
    """Return the numbers for the sums of blocks."""
    return _odd(np.arange(block, block + count) + 2 * _WORDS, device)


def _odd(places: np.ndarray, device: torch.device) -> Any:
    """Return an odd number for each place, int64: an array for the CPU, or a tensor on another device."""
    odd = (mix(places.astype(np.uint64)) | np.uint64(1)).view(np.int64)
    return odd if device.type == "cpu" else torch.from_numpy(odd).to(device)
