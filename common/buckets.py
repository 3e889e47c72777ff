"""The order in which DistributedDataParallel adds gradients, the same in every step of every start."""

import torch


def settle_buckets(forward: torch.nn.parallel.DistributedDataParallel, images: torch.Tensor) -> None:
    """Run one backward pass that leaves no trace, before training and on every process.

    After its first backward pass DistributedDataParallel puts the gradients into other buckets, in the order
    in which they became ready. Three or more processes then add them in another order, which rounds
    differently: without this, the first step after a restart would not be that of the uninterrupted run.
    Weights, buffers and random state are as before. images: at least two, [n, C, H, W], any values.
    """
    if torch.distributed.get_world_size() < 3:
        return
    parameter = next(forward.parameters())
    buffers = [(buffer, buffer.clone()) for buffer in forward.buffers()]
    with torch.random.fork_rng([parameter.device] if parameter.is_cuda else []):
        forward(images.to(parameter)).sum().backward()
    forward.zero_grad()
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
