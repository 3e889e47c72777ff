"""The same bits on any number of processes: a step is V shards, and their sum has one fixed order.

A sum of floats depends on the order of its additions, and that of all_reduce depends on the number of
processes. Here the global batch always consists of V shards, each with a forward and a backward pass, a
gradient and random numbers of its own. A process computes V / N neighbouring shards one after the other, and
all gradients are added in one binary tree over the shards:

    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))    the lower additions within a process, the upper ones between

Related work: M. Li et al., "EasyScale", SC '23, whose virtual workers move between GPUs.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from common.distributed import ranks
from common.ground import accelerator
from common.ground.exits import BadInput

HELP = "shards of a step, a power of two: the same bits on 1, 2, 4, ... V processes"
_Sums = dict[torch.Tensor, torch.Tensor]  # parameter -> gradient


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
    and deterministic algorithms on a GPU. Raises BadInput if V is not a power of two, or not divisible by the
    number of processes.
    `local`: shards of this process. `index`: the shard that is computed now, 0..V-1.
    """

    def __init__(self, count: int, device: torch.device):
        self.count, self.world_size = count, ranks.world_size()
        if count & (count - 1) or count % self.world_size:
            if ranks.is_initialized():  # a rank that leaves before the others are connected is their error
                torch.distributed.barrier()
            raise BadInput(
                f"--exact_shards {count}: expected a power of two that the {self.world_size} processes divide"
            )
        self.local = count // self.world_size
        self.first = self.index = ranks.rank() * self.local
        self._sums: list[_Sums] = []  # gradients of 1, 2, 4, ... shards, the nearest last
        self._losses: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []  # the buffers before the step
        self._after: list[torch.Tensor] = []  # and after the first shard
        self._collectives = 0
        torch.set_num_threads(1)  # the sums inside an operator depend on the number of threads
        if device.type != "cpu":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first call of cuBLAS
            torch.use_deterministic_algorithms(True)

    def attach(self, forward: Any) -> None:
        """Make DistributedDataParallel add the gradients in the tree. Call it once, before the first step.
        Raises BadInput if `forward` is another wrapper, such as FSDP."""
        if type(forward) is not DistributedDataParallel:
            name = type(forward).__name__
            raise BadInput(f"--exact_shards: expected a DistributedDataParallel (not FSDP), got {name}")
        self._forward, self._buffers = forward, [each.data for each in forward.module.buffers()]
        forward.require_backward_grad_sync = self.local == 1  # as no_sync(): the last shard of a step sends
        forward.register_forward_pre_hook(self._begin)  # not of the module, which may be copied
        forward.register_forward_hook(self._expect_no_collectives)
        forward.register_comm_hook(None, self._average)

    def add(self, loss: torch.Tensor) -> torch.Tensor | None:
        """End a shard after its backward(). Return None if another shard of the step follows.

        After the last one the gradients are the means over all shards, and the buffers are those of shard 0.
        Then the result is the mean loss of this process's shards. loss: scalar, the mean over the shard.
        """
        if self._collectives != _count_collectives():
            raise BadInput("--exact_shards: the model or the criterion communicates with other processes")
        self._losses.append(accelerator.double(loss.detach()))
        done = len(self._losses)
        if done == 1:
            self._after = [each.clone() for each in self._buffers]
        is_last = done == self.local
        for buffer, value in zip(self._buffers, self._after if is_last else self._before, strict=True):
            buffer.copy_(value)
        self._forward.require_backward_grad_sync = done % self.local == self.local - 1
        self.index = self.first + done % self.local
        if not is_last:
            self._keep_gradients(done)
            return None
        ranks.broadcast_buffers(self._forward.module)
        losses, self._losses, self._sums, self._before = self._losses, [], [], []
        return torch.stack(losses).mean()

    def rows(self, evaluate: Callable[[Iterable], torch.Tensor], loader: Any) -> torch.Tensor:
        """Return evaluate(batches), sums [n], for each part of a loader whose sampler was split, as the rows
        of this process's shards [V, n]. The other rows are zeros: all_reduce adds them in any order."""
        sampler = loader.plan.sampler
        with contextlib.closing(iter(loader)) as batches:
            counts = [len(part[:: sampler.largest]) for part in sampler.parts]
            own = torch.stack([evaluate(itertools.islice(batches, count)) for count in counts])
        rows = own.new_zeros(self.count, *own.shape[1:])
        rows[self.first : self.first + self.local] = own
        return rows

    def _begin(self, *_: Any) -> None:
        """Remember the buffers before the first shard: each shard of the step begins with them."""
        if torch.backends.cudnn.benchmark:
            raise BadInput("--exact_shards: torch.backends.cudnn.benchmark is True, expected False")
        if not self._before:
            self._before = [each.clone() for each in self._buffers]

    def _expect_no_collectives(self, *_: Any) -> None:
        self._collectives = _count_collectives()  # from now until add() those of _average() follow

    def _keep_gradients(self, done: int) -> None:
        """Move the gradients of a shard to the partial sums, as a binary counter adds 1."""
        sums: _Sums = {}
        for parameter in self._forward.module.parameters():
            if parameter.requires_grad:
                sums[parameter] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = None
        while done % 2 == 0:
            _add(sums, self._sums.pop())
            done //= 2
        self._sums.append(sums)

    def _average(self, _: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of gradients over all shards: a communication hook. The bucket has the gradients
        of this process's last shard."""
        flat, parameters = bucket.buffer(), bucket.parameters()
        pieces = zip(parameters, flat.split([each.numel() for each in parameters]), strict=True)
        # A gradient has the strides of its parameter; those of bucket.gradients() are others.
        gradients = {each: piece.as_strided(each.shape, each.stride()) for each, piece in pieces}
        for sums in reversed(self._sums):
            _add(gradients, sums)
        if self.world_size > 1:
            before = _count_collectives()
            self._sum_over_ranks(flat)
            self._collectives += _count_collectives() - before
        flat.div_(self.count)  # a power of two: exact
        devices: Any = [flat.device] if flat.device.type != "cpu" else None
        future = torch.futures.Future[torch.Tensor](devices=devices)
        future.set_result(flat)
        return future

    def _sum_over_ranks(self, flat: torch.Tensor) -> None:
        """Sum a tensor [n] over the ranks in the tree. A process adds one slice of it, which it gets from all
        processes, and sends the sum to all: the volume of all_reduce."""
        sizes = [len(part) for part in flat.tensor_split(self.world_size)]
        own = [sizes[ranks.rank()]] * self.world_size
        slices = flat.new_empty(sum(own))
        torch.distributed.all_to_all_single(slices, flat, own, sizes)
        rows = slices.view(self.world_size, own[0])
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
