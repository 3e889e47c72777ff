"""A pass through a network that leaves no trace, for what only a first pass brings about."""

from collections.abc import Callable

import torch


def backward_without_trace(
    forward: Callable, module: torch.nn.Module, images: torch.Tensor, passes: int
) -> None:
    """Run so many forward and backward passes. Weights, buffers, gradients (none) and random state are as
    before.

    forward: what is called, and calls module. images: [n, C, H, W], any values, at least two where there is
    BatchNorm.
    """
    parameter = next(module.parameters())
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng([parameter.device] if parameter.is_cuda else []):
        for _ in range(passes):
            module.zero_grad()
            forward(images.to(parameter)).sum().backward()
    module.zero_grad()
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
