"""Compress the gradients of DistributedDataParallel."""

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


def compress_gradients(forward: torch.nn.parallel.DistributedDataParallel, kind: str) -> None:
    """Send gradients as they are ("none") or as bfloat16 ("bf16"). Call it on every rank before training.

    bfloat16 has half the bytes of float32, the same range, and 8 bits of precision instead of 24. Gradients
    are rounded before they are sent and in every addition; the weights stay float32. A job of one process
    rounds nothing. Versions of gloo that cannot add bfloat16 raise RuntimeError in the first step.
    """
    if kind == "none" or torch.distributed.get_world_size() == 1:
        return
    forward.register_comm_hook(None, default_hooks.bf16_compress_hook)
