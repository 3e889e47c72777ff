"""A pass through a network that leaves no trace, for what only a first pass brings about."""

from collections.abc import Callable

import torch


def backward_without_trace(
    forward: Callable, module: torch.nn.Module, images: torch.Tensor, passes: int
) -> None:
    """Run so many forward and backward passes. Weights, buffers, gradients (none) and random state are as
    before, also where one fails.

    forward: what is called, and calls module. images: [n, C, H, W], any values, at least two where there is
    BatchNorm.
    """
    parameter = next(module.parameters())
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng([parameter.device] if parameter.is_cuda else []):
            for _ in range(passes):
                module.zero_grad()
                output = forward(images.to(parameter))  # alive until after backward(), as in training: CUDA
                output.sum().backward()  # graphs are recorded again where that differs
    finally:
        module.zero_grad()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
