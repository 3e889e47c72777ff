"""The states of a model that torch's fully_shard (FSDP2) shards: on one process, or on all.

A sharded tensor is a DTensor: each rank holds a part of its first dimension. The buffers of a model are not
sharded. Guide: guides/large_models.md.
"""

from typing import Any

import torch
from torch import nn


def is_sharded(model: nn.Module) -> bool:
    """Return whether fully_shard() was called on a model."""
    return any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__)  # torch 2.5 does not have it


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a sharded tensor."""
    return hasattr(value, "full_tensor")


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; another tensor is returned as it is."""
    part: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return part


def full(tensor: Any) -> torch.Tensor:
    """Return a sharded tensor as a whole; another tensor is returned as it is. Call it on every rank."""
    whole: torch.Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return whole
