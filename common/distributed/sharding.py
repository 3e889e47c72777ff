"""Shard a model with torch's fully_shard (FSDP2): its layers, and its states on one process or on all.

A sharded tensor is a DTensor: each rank holds a part of its first dimension. The buffers of a model are not
sharded. Guide: guides/large_models.md.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from common.compute import models
from common.console.arguments import boolean
from common.distributed import ranks
from common.ground.exits import BadInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a sharded job. Raises BadInput if this torch has no fully_shard()."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        raise BadInput(f"fully_shard() needs torch 2.6 or later, this is torch {torch.__version__}")
    add = parser.add_argument_group("sharding").add_argument
    help = "type that the layers compute in; weights stay float32 (default: float32)"
    add("--precision", choices=["float32", "bfloat16"], default="float32", help=help)
    help = "true: repeat each layer's forward pass in the backward pass, to keep less (default: false)"
    add("--checkpoint_activations", type=boolean, default=False, help=help)
    help = "full: rank 0 writes one file; sharded: each rank writes its shards (default: full)"
    add("--checkpoint_format", choices=["full", "sharded"], default="full", help=help)


def layers(model: nn.Module, precision: str) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the modules to give to fully_shard(), each with its MixedPrecisionPolicy; the model is the last.

    These are the elements of the outermost Sequential and ModuleList containers. In bfloat16 BatchNorm layers
    come first: their weights stay float32, because they are multiplied with statistics in float32. Gradients
    are summed in float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy  # not in torch 2.5

    policy = whole = MixedPrecisionPolicy()
    if precision == "bfloat16":
        for norm in [each for each in model.modules() if isinstance(each, _BatchNorm)]:
            yield norm, policy
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        whole = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for layer in _elements(model):
        yield layer, policy
    yield model, whole


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(module, nn.Sequential | nn.ModuleList):
            yield from _elements(child)
        elif not isinstance(child, _BatchNorm) and any(True for _ in child.parameters()):
            yield child


def checkpoint_activations(model: nn.Module) -> None:
    """Keep only the inputs of each layer; its backward pass repeats its forward pass, with the same random
    numbers. Call it before fully_shard()."""
    for layer in _elements(model):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    models.count_batches_once(model)


def is_sharded(model: nn.Module) -> bool:
    """Return whether fully_shard() was called on a model."""
    return any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__)  # torch 2.5 does not have it


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a sharded tensor."""
    return hasattr(value, "full_tensor")


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; another tensor is returned as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def full(tensor: Any) -> torch.Tensor:
    """Return a sharded tensor as a whole; another tensor is returned as it is. Call it on every rank."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def broadcast(state: Any, like: Any) -> Any:
    """Return rank 0's state on every rank, as shard() does. Other ranks never have a whole tensor in it."""
    received = ranks.broadcast_object(outline(state, like))
    return shard(state if ranks.is_first() else received, like)


def outline(state: Any, like: Any) -> Any:
    """Return the state with a meta tensor, which has only a shape and a type, for each one that is sharded in
    `like`."""
    return _map(lambda tensor, _: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), state, like)


def shard(state: Any, like: Any) -> Any:
    """Return nested dictionaries with rank 0's tensors, sharded like the tensors at their places in `like`.

    A sharded tensor in `like` that has the place of a dictionary stands for all tensors of its shape in it.
    Other values stay as they are. Call it on every rank.
    """
    return _map(_distribute, state, like)


def _map(change: Callable[[torch.Tensor, Any], Any], state: Any, like: Any) -> Any:
    if isinstance(state, dict):
        return {
            name: _map(change, each, like.get(name) if isinstance(like, dict) else like)
            for name, each in state.items()
        }
    is_same = is_dtensor(like) and isinstance(state, torch.Tensor) and state.shape == like.shape
    return change(state, like) if is_same else state


def _distribute(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    from torch.distributed.tensor import distribute_tensor  # not in torch 2.4

    if tensor.is_meta:  # its values come from rank 0
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=like.device)
    return distribute_tensor(tensor.contiguous(), like.device_mesh, like.placements)
