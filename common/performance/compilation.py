"""Compiling before training, not in its first step: the time is known, and nothing waits for it later."""

from collections.abc import Callable

import torch

from common.performance.trial import backward_without_trace

_PASSES = 3  # CUDA graphs are recorded in the second, and the third replays them


def compiled(module: torch.nn.Module, images: torch.Tensor, say: Callable[[str], None]) -> Callable:
    """The module compiled for batches like these, on a GPU with its kernels recorded as CUDA graphs; as it is
    where that does not work (no compiler, no Triton), which is said.

    images: a batch as training will have it, float [n, C, H, W]; other shapes are compiled again. The module
    itself, its weights and its buffers stay as they are. Source: J. Ansel et al., "PyTorch 2", ASPLOS 2024.
    """
    mode = "reduce-overhead" if images.is_cuda else None
    try:
        fast = torch.compile(module, mode=mode, dynamic=False)  # raises where Python is too new for torch
        backward_without_trace(fast, module, images, _PASSES)
    except Exception as error:  # of any of its parts: training goes on without it
        say(f"not compiled: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        torch._dynamo.reset()
        return module
    return fast
