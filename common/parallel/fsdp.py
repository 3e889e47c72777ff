"""Prepare a model for torch's fully_shard (FSDP2): its options, and the layers to shard. Experimental.

Guide: guides/large_models.md.
"""

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from common.compute import recompute
from common.console.arguments import FLAG, OPERATION


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a sharded job. Raises BadInput if this torch has no fully_shard()."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        raise BadInput(f"fully_shard() needs torch 2.6 or later, this is torch {torch.__version__}")
    add = parser.add_argument_group("sharding").add_argument
    help = "type that the layers compute in; weights stay float32 (default: float32)"
    add("--precision", choices=["float32", "bfloat16"], default="float32", help=help)
    help = "repeat each layer's forward pass in the backward pass: less memory, more time, equal losses"
    add("--grad_checkpointing", role=OPERATION, **FLAG, help=help)
    help = "full: rank 0 writes one file; sharded: each rank writes its part (default: full)"
    add("--checkpoint_format", role=OPERATION, choices=["full", "sharded"], default="full", help=help)


def layers(model: nn.Module, precision: str) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the modules to give to fully_shard(), each with its MixedPrecisionPolicy; the model is the last.
    These are the elements of the outermost Sequential and ModuleList containers. In bfloat16 BatchNorm layers
    come first: their weights stay float32, because they are multiplied with statistics in float32. Gradients
    are summed in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy  # not in torch 2.5

    _check_group(model)
    policy = MixedPrecisionPolicy()  # of a layer
    whole = policy  # of the model
    if precision == "bfloat16":
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        for norm in norms:
            yield norm, policy
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        whole = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for layer in _elements(model):
        yield layer, policy
    # last: it takes the weights that no layer has taken
    yield model, whole


def _check_group(model: nn.Module) -> None:
    """Raise BadInput if processes share a GPU: gloo ends a process by a segmentation fault when it splits the
    gradients of a GPU (torch 2.11)."""
    device = accelerator.device_of(model)
    if device.type == "cpu":
        return
    processes = torch.distributed.get_world_size()
    if processes > 1 and torch.distributed.get_backend() == "gloo":
        raise BadInput(
            f"{processes} processes share {device}: gloo cannot shard a model on it. Start one process for "
            "each GPU (--processes_per_node), or more nodes"
        )


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of the outermost Sequential and ModuleList containers that have parameters."""
    for child in module.children():
        if not isinstance(module, nn.Sequential | nn.ModuleList):
            yield from _elements(child)
        elif not isinstance(child, _BatchNorm) and list(child.parameters()):
            yield child


def checkpoint_activations(model: nn.Module) -> None:
    """Keep only the inputs of each layer; its backward pass repeats its forward pass, with the same random
    numbers. Call it before fully_shard()."""
    for layer in _elements(model):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    recompute.count_batches_once(model)
