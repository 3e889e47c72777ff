"""How DistributedDataParallel's buckets of gradients travel, and the order in which they are added: the same
in every step of every start."""

import contextlib
import re
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from common.exits import BadInput
from common.performance.compilation import backward_without_trace


def compress_gradients(forward: torch.nn.parallel.DistributedDataParallel, kind: str) -> None:
    """Send gradients as they are ("none") or as bfloat16 ("bf16"), before the first step and on every
    process.

    bfloat16 is half the bytes of float32, with its range and 8 bits of precision instead of 24: gradients are
    rounded when they leave and in every addition on the way, and the weights stay float32. One process sends
    nothing and rounds nothing. Raises BadInput where the processes' backend cannot add bfloat16: gloo of old
    versions.
    """
    if kind == "none" or torch.distributed.get_world_size() == 1:
        return
    probe = torch.zeros(1, dtype=torch.bfloat16, device=next(forward.parameters()).device)
    try:
        torch.distributed.all_reduce(probe)
    except (RuntimeError, TypeError) as error:
        if not re.search("scalar type|data type", str(error)):  # gloo, nccl; all else is a lost process
            raise
        raise BadInput(
            f"--gradient_compression {kind}: {torch.distributed.get_backend()} of torch {torch.__version__} "
            f"cannot add bfloat16 ({error}); leave it out, or take a later version"
        ) from error
    forward.register_comm_hook(None, default_hooks.bf16_compress_hook)


def settle_buckets(forward: torch.nn.parallel.DistributedDataParallel, inputs: Any) -> None:
    """Run backward passes that leave no trace, before training and on every process.

    After its first backward pass DistributedDataParallel puts the gradients into other buckets, in the order
    in which they became ready. Three or more processes then add them in another order, which rounds
    differently: without this, the first step after a restart would not be that of the uninterrupted run. With
    static_graph the first pass only counts how often each gradient comes; the second one finds the order.
    Weights, buffers and random state are as before. inputs: a batch of at least two samples, any values.
    """
    if torch.distributed.get_world_size() < 3:
        return
    # A compiled model is not compiled for this batch, too: torch 2.6 and later can leave that out.
    set_stance = getattr(torch.compiler, "set_stance", None)
    with set_stance("force_eager") if set_stance else contextlib.nullcontext():
        backward_without_trace(forward, forward, inputs, 2 if forward.static_graph else 1)
