"""Compile a model before training, not in its first step, so that the time can be shown separately."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

_PASSES = 3  # the second pass records CUDA graphs, the third replays them


def backward_without_trace(forward: Callable, module: torch.nn.Module, inputs: Any, passes: int) -> None:
    """Run forward and backward passes that do not change weights, buffers and random state, even if a pass
    fails. Afterwards the gradients are None.

    forward: the function to call; it calls module.
    module: the raw model.
    inputs: a tensor [n, ...] or nested tensors, any values, n >= 2 for BatchNorm.
    passes: the number of passes.
    """
    parameter = next(module.parameters())
    kind = parameter.device.type

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(parameter) if tensor.is_floating_point() else tensor.to(parameter.device)

    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng([parameter.device] * (kind != "cpu"), device_type=kind):
            for _ in range(passes):
                module.zero_grad()
                # `output` lives until after backward(), as in training: otherwise torch records the CUDA
                # graphs again in training
                output = forward(tree_map_only(torch.Tensor, move, inputs))
                parts = [
                    each for each in tree_flatten(output)[0] if torch.is_tensor(each) and each.requires_grad
                ]
                torch.stack([each.sum() for each in parts]).sum().backward()
    finally:
        module.zero_grad()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def compile_module(
    module: torch.nn.Module,
    images: torch.Tensor,
    log: Callable[[str], None],
    graphs: bool = True,
) -> torch.nn.Module:
    """Return the module compiled for batches of this shape; on a GPU, its kernels are a CUDA graph.

    If it cannot be compiled (no compiler, no Triton), the reason is logged and the module is returned. The
    module, its weights and its buffers do not change. Source: J. Ansel et al., "PyTorch 2", ASPLOS 2024.

    module: the model to compile.
    images: a batch as in training, float [n, C, H, W]; other shapes are compiled again.
    log: called with one line.
    graphs: False if outputs are read after the next call: a CUDA graph overwrites its outputs.
    """
    mode = "reduce-overhead" if graphs and images.is_cuda else None
    try:
        # torch.compile() raises if Python is too new for torch
        fast = cast(torch.nn.Module, torch.compile(module, mode=mode, dynamic=False))
        backward_without_trace(fast, module, images, _PASSES)
    except Exception as error:  # the compiler raises many types: training continues without it
        log(f"not compiled: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        torch._dynamo.reset()
        return module
    return fast
