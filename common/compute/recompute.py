"""Compute layers again in the backward pass, which then needs less memory."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bootfile.ground.errors import BadInput
from common.compute.networks import TIMM


def checkpoint_blocks(model: Any, arch: str) -> None:
    """Compute the blocks of a classifier again in the backward pass, which then needs only their inputs: less
    memory, more time, equal results. Raises BadInput. Source: T. Chen et al., arXiv:1604.06174.
    """
    cannot = f"--grad_checkpointing: {arch} has no blocks for it: --accumulate N also needs less memory"
    if arch.startswith(TIMM):
        try:
            model.set_grad_checkpointing()
        except (AssertionError, AttributeError) as error:
            raise BadInput(cannot) from error
    else:
        blocks = list(_blocks(model))
        if not blocks:
            raise BadInput(cannot)
        for block in blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    count_batches_once(model)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of sequences that are more than one layer."""
    for child in module.children():
        is_member = isinstance(module, nn.Sequential) and not isinstance(child, nn.Sequential)
        if is_member and next(child.children(), None):
            yield child
        else:
            yield from _blocks(child)


def count_batches_once(model: nn.Module) -> None:
    """Let BatchNorm's statistics count a batch once if layers are computed again in the backward pass."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.forward = functools.partial(_count_once, module, module.forward)  # type: ignore[method-assign]


def _count_once(module: Any, forward: Callable, features: torch.Tensor) -> torch.Tensor:
    """Call the forward() of BatchNorm, in its place. The model calls it in the forward pass, and checkpoint()
    again in the backward pass: then its statistics do not change."""
    is_in_backward = torch._C._current_graph_task_id() != -1  # autograd numbers its backward passes
    if not is_in_backward or not module.training or not module.track_running_stats:
        return forward(features)
    momentum = module.momentum
    module.momentum = 0.0
    module.num_batches_tracked.sub_(1)  # forward() adds 1
    try:
        return forward(features)
    finally:  # checkpoint() ends the second computation of a block with an exception
        module.momentum = momentum
