"""Add the gradients of DistributedDataParallel in the same order after a restart."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only


def settle_buckets(forward: torch.nn.parallel.DistributedDataParallel, inputs: Any) -> None:
    """Run backward passes that change no state, on every rank before training, if there are three or more.
    After its first backward pass DistributedDataParallel reorders the buckets by the time at which gradients
        are ready, and three or more processes then round differently: the first step after a restart would be
        another one. With static_graph only the second pass finds the order.
    inputs: a batch of at least two samples, any values.
    """
    passes = 2 if forward.static_graph else 1
    # torch 2.6 and later can run a compiled model without compiling it for this batch.
    eager: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if set_stance := getattr(torch.compiler, "set_stance", None):
        eager = set_stance("force_eager")
    # cudnn.benchmark would try all algorithms for this batch.
    with eager, torch.backends.cudnn.flags(enabled=True, benchmark=False):
        backward_without_trace(forward, forward, inputs, passes)


def backward_without_trace(
    forward: Callable[..., Any], module: torch.nn.Module, inputs: Any, passes: int
) -> None:
    """Run forward and backward passes that do not change weights, buffers and random state, even if one
    fails. Afterwards the gradients are None.
    forward: the function to call; it calls module, the raw model. inputs: a tensor [n, ...] or nested
        tensors, any values, n >= 2 for BatchNorm.
    """
    parameter = next(module.parameters())
    kind = parameter.device.type

    def move(tensor: torch.Tensor) -> torch.Tensor:
        # floating-point numbers get the type of the parameter, too
        return tensor.to(parameter) if tensor.is_floating_point() else tensor.to(parameter.device)

    # kept for the end: a forward pass changes the statistics of BatchNorm
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        devices = [] if kind == "cpu" else [parameter.device]
        with torch.random.fork_rng(devices, device_type=kind):
            for _ in range(passes):
                module.zero_grad()
                # `output` lives until after backward(), as in training: otherwise torch records the CUDA
                # graphs again in training
                output = forward(tree_map_only(torch.Tensor, move, inputs))
                leaves = tree_flatten(output)[0]
                sums = [leaf.sum() for leaf in leaves if torch.is_tensor(leaf) and leaf.requires_grad]
                torch.stack(sums).sum().backward()
    finally:
        module.zero_grad()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
