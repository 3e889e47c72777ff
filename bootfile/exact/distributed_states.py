"""A state whose tensors are sharded like those of another one.

A restart loads this module, and a save of each rank's part.
"""

from collections.abc import Callable
from typing import Any

import torch

from bootfile.exact.dtensors import is_dtensor
from bootfile.processes import ranks


def broadcast(state: Any, like: Any) -> Any:
    """Return rank 0's state on every rank, as distribute() does. Other ranks have no whole tensor in it."""
    # shapes and plain values first; the elements of a sharded tensor follow in parts
    received = ranks.broadcast_object(outline(state, like))
    if not ranks.is_first():
        state = received
    return distribute(state, like)


def outline(state: Any, like: Any) -> Any:
    """Return the state with a meta tensor for each one that is sharded in `like`."""
    return _map(_outline, state, like)


def _outline(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def distribute(state: Any, like: Any) -> Any:
    """Return nested dictionaries with rank 0's tensors, sharded like the tensors at their places in `like`.
    Call it on every rank.
    A sharded tensor in `like` that has the place of a dictionary stands for all tensors of its shape in it.
    """
    return _map(_distribute, state, like)


def _map(change: Callable[[torch.Tensor, Any], Any], state: Any, like: Any) -> Any:
    """Return the state with change(tensor, sharded tensor) for each tensor that is sharded in `like`."""
    if isinstance(state, dict):
        changed = {}
        for name, part in state.items():
            like_part = like.get(name) if isinstance(like, dict) else like
            changed[name] = _map(change, part, like_part)
        return changed
    is_same = is_dtensor(like) and isinstance(state, torch.Tensor) and state.shape == like.shape
    return change(state, like) if is_same else state


def _distribute(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    from torch.distributed.tensor import distribute_tensor  # not in torch 2.4

    if tensor.is_meta:  # its values come from rank 0
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=like.device)
    return distribute_tensor(tensor.contiguous(), like.device_mesh, like.placements)
