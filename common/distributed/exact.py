"""The same bits on any number of processes: a step is V shards, and their sum has one fixed order.

A sum of floats depends on the order of its additions, and that of all_reduce depends on the number of
processes. Here the global batch always consists of V shards, each with a forward and a backward pass, a
gradient and random numbers of its own. A process computes V / N neighbouring shards one after the other, and
all gradients are added in one binary tree over the shards:

    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))    the lower additions within a process, the upper ones between

Related work: M. Li et al., "EasyScale", SC '23, whose virtual workers move between GPUs.
"""

import argparse
import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from common.distributed import ranks
from common.distributed.batchnorm import GlooSyncBatchNorm
from common.ground.exits import BadInput

_Sums = dict[torch.Tensor, torch.Tensor]  # parameter -> gradient
HELP = "shards of a step, a power of two: the same bits on 1, 2, 4, ... V processes"


def shard_count(text: str) -> int:
    """Return the number of --exact_shards."""
    count = int(text) if text.isdecimal() else 0
    if count < 1 or count & (count - 1):
        raise argparse.ArgumentTypeError(f"{text} is not a power of two")
    return count


def sum_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows, [n, ...] -> [...], in the binary tree over them; n is a power of two. The
    rows are overwritten."""
    distance = 1
    while distance < len(rows):
        rows[:: 2 * distance].add_(rows[distance :: 2 * distance])
        distance *= 2
    return rows[0]


class Shards:
    """The shards of each step, whose gradients DistributedDataParallel adds in one fixed binary tree.

    count: V, of a step, over all processes. device: that of the model. Operators use one thread on the CPU,
    and deterministic algorithms on a GPU. Raises BadInput if V is not divisible by the number of processes.
    `local`: shards of this process. `index`: the shard that is computed now, 0..V-1.
    """

    def __init__(self, count: int, device: torch.device):
        self.count, self.rank, self.world_size = count, ranks.rank(), ranks.world_size()
        self.local, rest = divmod(count, self.world_size)
        if rest or not self.local:
            raise BadInput(
                f"--exact_shards {count} is not divisible by {self.world_size} processes: expected 1, 2, 4, "
                f"... or {count} processes"
            )
        torch.set_num_threads(1)  # the sums inside an operator depend on the number of threads
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first call of cuBLAS
            torch.use_deterministic_algorithms(True)
        self._place = 0  # of the shard among those of this process
        self._sums: list[_Sums] = []  # of 1, 2, 4, ... shards, as bits
        self._losses: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []  # buffers before the step, and after the first shard
        self._first: list[torch.Tensor] = []
        self._collectives = 0  # of the last bucket's hooks

    @property
    def index(self) -> int:
        """Return the number of the shard that is computed now."""
        return self.rank * self.local + self._place

    def attach(self, forward: Any) -> None:
        """Make DistributedDataParallel add the gradients in the tree. Call it once, before the first step.

        Raises BadInput if `forward` is another wrapper, such as FSDP, or if its BatchNorm is synchronised.
        """
        if type(forward) is not DistributedDataParallel:
            raise BadInput(
                f"--exact_shards: expected a DistributedDataParallel, got {type(forward).__name__}: each "
                "process needs the whole gradient of its shards"
            )
        for name, layer in forward.module.named_modules():
            if isinstance(layer, torch.nn.SyncBatchNorm | GlooSyncBatchNorm):
                raise BadInput(f"--exact_shards: {name} is a {type(layer).__name__}, expected a BatchNorm")
        self._forward, self._buffers = forward, [each.data for each in forward.module.buffers()]
        forward.require_backward_grad_sync = self.local == 1  # as no_sync(): the last shard of a step sends
        forward.module.register_forward_pre_hook(self._begin)
        forward.register_comm_hook(None, self._sum_bucket)

    def add(self, loss: torch.Tensor) -> torch.Tensor | None:
        """End a shard after its backward(). Return None if another shard of the step follows.

        After the last one the gradients are the means over all shards, and the buffers are those of shard 0.
        Then the result is the mean loss of this process's shards. loss: scalar, the mean over the shard.
        """
        if self._collectives != _count_collectives():
            raise BadInput(
                "--exact_shards: the model or the criterion communicates with other processes, expected one "
                "that depends on its shard only"
            )
        self._losses.append(loss.detach().double())
        if self._place == 0:
            self._first = [each.clone() for each in self._buffers]
        self._place += 1
        is_last = self._place == self.local
        if not is_last:
            self._keep_gradients()
        for buffer, kept in zip(self._buffers, self._first if is_last else self._before, strict=True):
            buffer.copy_(kept)
        self._forward.require_backward_grad_sync = self._place % self.local == self.local - 1
        if not is_last:
            return None
        ranks.broadcast_buffers(self._forward.module)
        losses, self._losses, self._place, self._before = self._losses, [], 0, []
        self._sums.clear()
        return torch.stack(losses).mean()

    def parts(self, loader: Any) -> Iterator[Iterable]:
        """Yield the batches of each part of this process's evaluation data, whose sampler was split."""
        sampler = loader.plan.sampler
        with contextlib.closing(iter(loader)) as batches:
            for part in sampler.parts:
                yield itertools.islice(batches, len(part[:: sampler.largest]))

    def rows(self, sums: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the sums of this process's parts as the rows of its shards [V, n]; the others are zeros. So
        all_reduce adds zeros only, in any order."""
        own = torch.stack(list(sums))
        rows = own.new_zeros(self.count, *own.shape[1:])
        rows[self.rank * self.local :][: self.local] = own
        return rows

    def _begin(self, model: torch.nn.Module, _: Any) -> None:
        """Begin a forward pass: each shard begins with the buffers from before the step."""
        if not model.training:
            return
        if torch.backends.cudnn.benchmark:
            raise BadInput("--exact_shards: torch.backends.cudnn.benchmark is True, expected False")
        if self._place == 0 and not self._before:
            self._before = [each.clone() for each in self._buffers]
        self._collectives = _count_collectives()

    def _keep_gradients(self) -> None:
        """Move the gradients of a shard to the partial sums, as a binary counter adds 1."""
        own: _Sums = {}
        for parameter in self._forward.module.parameters():
            if parameter.requires_grad:
                own[parameter] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = None
        shards = self._place
        while shards % 2 == 0:
            _add(own, self._sums.pop())
            shards //= 2
        self._sums.append(own)

    def _sum_bucket(self, _: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average the gradients of a bucket over all shards: a communication hook. The bucket
        has the gradients of this process's last shard."""
        flat = bucket.buffer()
        pieces = flat.split([each.numel() for each in bucket.parameters()])
        own = {
            parameter: piece.as_strided(parameter.shape, parameter.stride())  # unlike bucket.gradients()
            for parameter, piece in zip(bucket.parameters(), pieces, strict=True)
        }
        for sums in reversed(self._sums):  # the nearest neighbours first
            _add(own, sums)
        if self.world_size > 1:
            before = _count_collectives()
            self._sum_over_ranks(flat)
            self._collectives += _count_collectives() - before
        flat.div_(self.count)  # a power of two: exact
        future = torch.futures.Future[torch.Tensor](devices=[flat.device] if flat.is_cuda else None)
        future.set_result(flat)
        return future

    def _sum_over_ranks(self, flat: torch.Tensor) -> None:
        """Sum a tensor [n] over the ranks in the tree. A process adds one slice of it, which it gets from all
        processes, and sends the sum to all: the volume of all_reduce."""
        sizes = [len(part) for part in flat.tensor_split(self.world_size)]
        own = [sizes[self.rank]] * self.world_size
        slices = flat.new_empty(sum(own))
        torch.distributed.all_to_all_single(slices, flat, own, sizes)
        rows = slices.view(self.world_size, sizes[self.rank])
        rows[1:] = sum_rows(rows)
        torch.distributed.all_to_all_single(flat, slices, sizes, own)


def _add(sums: _Sums, others: _Sums) -> None:
    torch._foreach_add_(list(sums.values()), [others[each] for each in sums])


def _count_collectives() -> int:
    """Return the number of collectives so far; 0 if this version of torch does not count them."""
    group: Any = torch.distributed.distributed_c10d._get_default_group()
    try:
        return group._get_sequence_number_for_group()
    except RuntimeError:
        return 0
