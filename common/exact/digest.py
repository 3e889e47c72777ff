"""The digest of a run's state: weights, buffers and the state of optimizers, equal for equal bits.

    FOLDER/state.jsonl    {"step": 44, "digest": "9f3c...", "parts": {"model.fc.weight": "1d22c0ab", ...}}

There is a line for each checkpoint and each epoch. The digest does not depend on the device, the memory
format or the number of processes. It has the numbers of an optimizer's parameter groups, such as the learning
rate.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from common.exact.digest_lines import FILE, cut, read, write
from common.parallel import dtensors

__all__ = ["FILE", "KERNELS", "cut", "leaves", "read", "summarize", "write"]
KERNELS = {"params", "fused", "foreach", "capturable", "differentiable"}  # not hyperparameters
_WITHOUT = {"receipt"}  # objects of a checkpoint that are not state of the model


def leaves(objects: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values in the objects of a checkpoint, for example "model.fc.weight"."""
    for name, value in objects.items():
        if name not in _WITHOUT:
            yield from _leaves(name, value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        if value.keys() >= {"state", "param_groups"}:
            groups = [
                {key: each for key, each in group.items() if key not in KERNELS}
                for group in value["param_groups"]
            ]
            value = {"state": value["state"], "param_groups": groups}
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    else:
        yield name, value
        return
    for part, each in parts:
        yield from _leaves(f"{name}.{part}", each)


def summarize(step: int, objects: dict[str, Any]) -> dict:
    """Return a line of FILE. objects: those of a checkpoint. Call it on every rank if they are sharded."""
    parts, whole = {}, hashlib.blake2b(digest_size=8)
    for name, value in sorted(leaves(objects), key=lambda leaf: leaf[0]):
        digest = hashlib.blake2b(digest_size=16)
        if isinstance(value, torch.Tensor):
            value = dtensors.full(value).cpu()
            digest.update(f"{value.dtype} {list(value.shape)} ".encode())
            dense = value.detach() if value.layout == torch.strided else value.detach().to_dense()
            digest.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(sorted(value, key=repr) if isinstance(value, set) else value).encode())
        parts[name] = digest.hexdigest()[:8]
        whole.update(f"{name}\0".encode() + digest.digest())
    return {"step": step, "digest": whole.hexdigest(), "parts": parts}
