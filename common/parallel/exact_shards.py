"""The same bits on any number of processes: a step is V shards, and their sum has one fixed order.

A sum of floats depends on the order of its additions, and that of all_reduce depends on the number of
processes. Here the global batch always consists of V shards, each with a forward and a backward pass, a
gradient and random numbers of its own. A process computes neighbouring shards one after the other, about
V / N, and all gradients are added in one binary tree over the shards:

    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))    the lower additions within a process, the upper ones between

N need not divide V. With 3 processes and V = 8 the second one has the shards 2, 3 and 4, and sends two sums,
of 2 + 3 and of 4. A process sends at most 2 log2(V) - 2 sums, and one if N divides V.

A job gives it a DistributedDataParallel, and computes each shard by forward(inputs), loss.backward() and
shards.add(loss). Outside are other wrappers such as FSDP, sparse gradients, collectives in a shard, a
closure of an optimizer, and a model or a criterion with state that is not in buffers (repeated_calls.py).

Related work: M. Li et al., "EasyScale", SC '23, whose virtual workers move between GPUs.
"""

import contextlib
import functools
import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from bootfile.exact.plugins import Processes
from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from bootfile.ground.numbers import part_of
from bootfile.machine import convolution
from bootfile.processes import ranks
from common.parallel.repeated_calls import Guards, is_dense

HELP = "shards of a step, a power of two: the same bits on any number of processes up to V"
_FLAT = 2**25  # bytes that are sent together
_Sums = dict[torch.Tensor, torch.Tensor]  # parameter -> gradient


def list_nodes(shards: range) -> list[range]:
    """Return the largest nodes of the binary tree that cover neighbouring shards, in their order."""
    nodes: list[range] = []
    for shard in shards:
        _push_node(nodes, range(shard, shard + 1))
    return nodes


def _push_node(nodes: list[range], node: range) -> int:
    """Append a node, and join the last two nodes while they are the halves of one node of the tree. Return
    how often two were joined: the caller joins the last two of its sums as often."""
    nodes.append(node)
    joined = 0
    while len(nodes) > 1:
        left, right = nodes[-2:]
        parent_size = 2 * len(left)
        if len(left) != len(right) or left.start % parent_size != 0:
            break
        nodes[-2:] = [range(left.start, right.stop)]
        joined += 1
    return joined


def sum_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of all rows in the binary tree over them, [V, ...] -> [...]. The rows are overwritten.

    rows: one for each shard of a step or of an evaluation, as Shards.gather() and Shards.rows() make them.
    All rows must be there before: a process that has only its own ones gives a wrong sum.
    """
    distance = 1  # between the rows that are added
    while distance < len(rows):
        left = rows[:: 2 * distance]
        right = rows[distance :: 2 * distance]
        left.add_(right)
        distance *= 2
    return rows[0]


class Shards:
    """The shards of each step, whose gradients are added in one fixed binary tree.

    A job makes one on every rank before the model. On every rank a step runs so:

        forward()      of the DistributedDataParallel, whose hook calls _begin_forward()
        backward()     autograd calls _note_gradient() for each parameter; nothing is sent
        add(loss)      ends the shard: its gradients go to the partial sums. These three for each shard.
        _end_step()    in the add() of the last shard: the ranks exchange sums, and the gradients are complete

    count: V, of a step, over all processes. device: that of the model. Operators of this process use one
    thread on the CPU, and deterministic algorithms on a GPU, from now on. Raises BadInput if V is not a power
    of two, or less than the number of processes.
    `local`: number of shards of this process. `first`: the first of them. `index`: the shard that is computed
    now, 0..V-1. `guards`: what checks the model in the first steps, from attach() on. `is_repeating`: a
    module is called now only to compare its results: a hook that counts calls ignores this one.
    """

    guards: Guards

    def __init__(self, count: int, device: torch.device):
        self.count = count
        self.world_size = ranks.world_size()
        self.device = device
        self.is_repeating = False
        is_power_of_two = count.bit_count() == 1
        if not is_power_of_two or count < self.world_size:
            if ranks.is_initialized():  # a rank that leaves before the others are connected is their error
                torch.distributed.barrier()
            raise BadInput(
                f"--exact_shards {count}: expected a power of two, and a shard for each of the "
                f"{self.world_size} processes"
            )
        shards = part_of(count, ranks.rank(), self.world_size)
        self.local = len(shards)
        self.first = shards.start
        self.index = shards.start
        self._nodes: list[range] = []  # nodes of the tree whose gradients are in _sums
        self._sums: list[_Sums] = []
        self._earlier: _Sums = {}  # gradients from before the step, as in an accumulation
        self._used: set[torch.Tensor] = set()  # parameters with a gradient of this shard
        self._hooked: dict[torch.Tensor, Any] = {}  # parameter -> handle of its hook
        self._losses: list[torch.Tensor] = []  # of the shards of this step that have ended
        self._buffers: list[_Buffer] = []  # at the begin of this step; [] before its first forward pass
        self._after: list[_Buffer] = []  # after the shard that gives its buffers to this step
        self._before: list[_Buffer] = []  # at the begin of the newest step, also when it has ended
        self._processes: Processes | None = None  # those of the run
        self._is_open = False  # from the forward pass of a shard until add()
        self._collectives = 0  # of torch.distributed, when the shard began
        self._recheck: Any = None  # with --recheck (recheck.py)
        _fix_settings(device)

    def attach(self, forward: Any) -> None:
        """Add the gradients of a DistributedDataParallel in the tree. Call it once on every rank, before the
        first step. Raises BadInput if `forward` is another wrapper, such as FSDP."""
        if type(forward) is not DistributedDataParallel:
            name = type(forward).__name__
            raise BadInput(f"--exact_shards: expected a DistributedDataParallel (not FSDP), got {name}")
        self._forward = forward
        forward.exact_shards = self  # type: ignore[assignment]
        forward.require_backward_grad_sync = False  # as no_sync(): add() sends
        forward.broadcast_buffers = False
        forward.find_unused_parameters = False
        forward.static_graph = False
        # a hook of the wrapper, not of the module, which may be copied
        forward.register_forward_pre_hook(self._begin_forward)
        self.guards = Guards(forward)  # its hooks run after those above
        self.watch({})

    def recheck(self, every: int, say: Callable[[str], object]) -> Any:
        """Compute one shard in `every` steps a second time, on the next process, from now on, and return the
        plugin that does it. Call it on every rank after attach(), before the first step. say: prints a line
        on rank 0."""
        from common.parallel.recheck import Recheck  # most jobs compute each shard once

        self._recheck = Recheck(self, self._forward, every, say)
        return self._recheck

    def find_owner(self, shard: int) -> int:
        """Return the rank that computes a shard."""
        owner = 0
        while shard not in part_of(self.count, owner, self.world_size):
            owner += 1
        return owner

    def watch(self, objects: dict[str, Any], loader: Any = None, processes: Processes | None = None) -> None:
        """Treat the modules and the optimizers among these objects as those of the model: a shard begins with
        their buffers, and the gradients of what they train are added. attach() calls it without objects, and
        the Checkpointer with its own on every rank before the first step.

        loader: that of the training, which hands out a shard as a batch. processes: those of the run; they
        may stop a step between two shards.
        """
        modules = {name: value for name, value in objects.items() if isinstance(value, torch.nn.Module)}
        parts = dict.fromkeys(self._forward.module.modules())
        for module in modules.values():
            parts |= dict.fromkeys(module.modules())
        self._modules = list(parts)  # a part of several modules is there once
        self._optimizers = [value for value in objects.values() if isinstance(value, torch.optim.Optimizer)]
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._check_optimizer)
        self._loader = loader
        self._processes = processes
        self._buffers = []
        self._is_open = False
        self.guards.watch(modules)

    @torch.no_grad()
    def add(self, loss: torch.Tensor) -> torch.Tensor | None:
        """End a shard after its backward(). Return None if another shard of the step follows. The job calls
        it on every rank for each shard of the rank.

        After the last one the gradients are the means over all shards, and the buffers are those of shard 0.
        Then the result is the mean loss of all shards, equal on all ranks. loss: scalar, the mean over the
        shard. A parameter without a gradient has the gradient 0. Gradients from before the step, as in an
        accumulation, are added to the means.
        """
        if not self._is_open:
            raise BadInput("--exact_shards: shards.add() without forward(inputs): call forward, not model")
        if self._processes:
            self._processes.check()
        # a process with fewer shards would not take part, and the others would wait
        if self._collectives != _count_collectives():
            raise BadInput("--exact_shards: the model or the criterion communicates with other processes")
        counts = self._count_samples()
        loss = accelerator.double(loss.detach()).squeeze()
        count = counts[self.index] if counts else 1
        # the loss of a shard without a sample may be NaN
        self._losses.append(loss * count if count else torch.zeros_like(loss))
        is_first = len(self._losses) == 1
        is_last = len(self._losses) == self.local
        # ranks without the buffer shard get its buffers in _average()
        if is_first or self.index == _find_buffer_shard(counts):
            self._after = _read(self._buffers)
        step = 0 if self._loader is None else self._loader.step
        if is_first:
            self._step_at_first = step
        elif step != self._step_at_first:  # add() was called for fewer batches than the rank has shards
            raise BadInput("--exact_shards: expected one shards.add() for each batch of the training loader")
        self._keep_gradients(is_first, counts)
        restore_buffers = functools.partial(_write, self._buffers)
        # before the gradients are added over the ranks: code that is refused has not changed the weights
        if is_last and self.guards.is_checked:
            with self.repeating():
                self.guards.repeat_calls(restore_buffers)
        if is_last and self._recheck:
            self._recheck.compare(self._loader.step, restore_buffers)
        self._is_open = False
        if is_last:
            return self._end_step(counts)
        # the next shard begins with the buffers that the step has begun with
        _write(self._buffers)
        self.index += 1
        return None

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """Let is_repeating be true in a block."""
        self.is_repeating = True
        try:
            yield
        finally:
            self.is_repeating = False

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Raise BadInput for a step with a closure, which sees one shard, or between two shards. torch calls
        it before each step of an optimizer, with the arguments of step(); the first one is the optimizer."""
        name = f"--exact_shards: {type(optimizer).__name__}.step()"
        closures = [*args[1:2], kwargs.get("closure")]
        if any(closure is not None for closure in closures):
            raise BadInput(f"{name} got a closure, which sees one shard: expected an optimizer without one")
        if self._is_open or self._losses:
            raise BadInput(f"{name} between two shards: expected it after shards.add() has returned a loss")

    def _count_samples(self) -> tuple[int, ...]:
        """Return the number of samples of each of the V shards of this step, if --without has removed some:
        then the means are over those that are left. () in a step that has all its samples."""
        removal = getattr(self._loader, "removal", None)
        if not removal:
            return ()
        counts: tuple[int, ...] = removal.count(self._loader.plan.sampler, self._loader.step, self.count)
        return () if sum(counts) == self._loader.plan.sampler.global_batch else counts

    def _end_step(self, counts: tuple[int, ...]) -> torch.Tensor:
        """End a step after its last shard on this process, and return the mean loss. All ranks wait for each
        other here, and nowhere else in a step that is not checked. counts: see _count_samples()."""
        # of a shard of this rank; _average() replaces them if another rank has computed the buffer shard
        _write(self._after)
        self.index = self.first
        total = max(1, sum(counts)) if counts else self.count
        self._average(total, _find_buffer_shard(counts))
        # each rank adds zeros to the rows of the others: nothing is rounded before sum_rows()
        rows = self.make_rows(self._losses)
        self._losses = []
        if self._recheck:
            restore_buffers = functools.partial(_write, self._buffers)
            rows = self._recheck.exchange(self._loader.step, rows, restore_buffers)
        elif self.world_size > 1:
            with ranks.waiting():
                torch.distributed.all_reduce(rows)
        self._buffers = []
        self.guards.end_step()
        return sum_rows(rows) / total

    def undo(self) -> None:
        """Set the buffers to their values before the last step that was begun. It is called on a process that
        lives on when another was lost in the middle of a step."""
        _write(self._before)

    def detach(self) -> None:
        """Remove all hooks when this process leaves the training, before main() runs again in it: those of
        parameters, to which DistributedDataParallel refers in C++, would keep the model in memory."""
        for handle in self._hooked.values():
            handle.remove()

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows [V, n] of all shards on every process. Of the given rows only this process's count;
        all_reduce adds zeros to them, so nothing is rounded. All ranks call it at the same step, and wait for
        each other."""
        gathered = self.make_rows([*rows[self.first : self.first + self.local]])
        # a shard whose samples --without has removed counts nothing
        gathered[[shard for shard, count in enumerate(self._count_samples()) if not count]] = 0
        if self.world_size > 1:
            torch.distributed.all_reduce(gathered)
        return gathered

    def rows(self, evaluate: Callable[[Iterable], torch.Tensor], loader: Any) -> torch.Tensor:
        """Evaluate each shard of this process alone, and return its sums in its row of [V, n]. The rows of
        other processes are zeros: all_reduce adds them in any order. The caller then reduces, and sum_rows()
        adds the shards. Each rank calls it, and waits for no other one.

        evaluate: returns the sums [n] over the batches that it gets. loader: has the batches of all shards of
        this process in a row, from a sampler that was split() into V shards.
        """
        _check_settings()
        sampler = loader.plan.sampler
        sums = []
        # each shard by itself, as another rank would evaluate it: no sum has samples of two shards
        with contextlib.closing(iter(loader)) as batches:
            for shard in sampler.parts:
                count = math.ceil(len(shard) / sampler.largest)  # batches of the shard
                sums.append(evaluate(itertools.islice(batches, count)))
        return self.make_rows(sums)

    def make_rows(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Return the values [...] of this process's shards as rows [V, ...] with zeros for the others."""
        rows = values[0].new_zeros(self.count, *values[0].shape)
        rows[self.first : self.first + self.local] = torch.stack(values)
        return rows

    def _begin_forward(self, *_: Any) -> None:
        """Begin a shard, and with the first one the step. DistributedDataParallel calls it before each
        forward pass, also of an evaluation."""
        _check_settings()
        # the first forward pass since the last step: each shard begins with these buffers
        if not self._buffers:
            self._buffers = _list_buffers(self._modules)
            self._before = self._buffers
        if not torch.is_grad_enabled():
            return  # an evaluation
        is_new = not self._is_open  # else a second forward pass of the shard
        if is_new:
            self._is_open = True
            self._collectives = _count_collectives()
            if not self._losses:  # the first shard of a step
                for parameter in self.list_trained():  # an optimizer may have got more since the last step
                    if parameter not in self._hooked:
                        hook = functools.partial(self._note_gradient, parameter)
                        self._hooked[parameter] = parameter.register_hook(hook)
                self.guards.begin_step(self._list_sources())
        if self._recheck:
            sources = self._list_sources() if is_new else None
            self._recheck.begin_forward(self._loader.step, self.index, sources)

    def _list_sources(self) -> list[Any]:
        """Return the generators from which a module may draw random numbers in this step."""
        sources = [torch, random, np.random]
        if self.device.type != "cpu":
            sources.append(accelerator.of(self.device))
        if self._loader is not None:
            sources += [generator.value for generator in self._loader.generators]
        return sources

    def list_trained(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients are added, in the same order on every rank."""
        parameters: dict[torch.Tensor, None] = dict.fromkeys(self._forward.module.parameters())
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                parameters |= dict.fromkeys(group["params"])
        return [parameter for parameter in parameters if parameter.requires_grad]

    def _note_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Set the gradient that a parameter had before the step aside, when the step gives it its first one.
        autograd calls it in each backward pass, before it adds `gradient` to parameter.grad."""
        if gradient.layout != torch.strided:
            named = self._forward.module.named_parameters()
            shown = next((name for name, candidate in named if candidate is parameter), "a parameter")
            raise BadInput(f"--exact_shards: the gradient of {shown} is sparse, expected a dense one")
        if self.is_repeating:
            return  # a shard is computed again, and its gradients are only compared
        is_first_of_step = not self._losses and parameter not in self._used
        if is_first_of_step and parameter.grad is not None:
            self._earlier[parameter] = parameter.grad  # _average() adds it to the mean
            parameter.grad = None
        self._used.add(parameter)

    def _keep_gradients(self, is_first: bool, counts: tuple[int, ...]) -> None:
        """Move the gradients of a shard to the partial sums, and add the halves of nodes. add() calls it, so
        the backward pass has ended. is_first: whether the shard is the first of the step on this process.
        counts: see _count_samples(); with them a gradient is multiplied by the samples of its shard."""
        sums: _Sums = {}
        for parameter in self.list_trained():
            gradient = parameter.grad
            # the next backward() would add to it, in another order than that of the tree
            parameter.grad = None
            if is_first and gradient is not None and parameter not in self._used:
                self._earlier[parameter] = gradient  # the backward pass has not touched it
                gradient = None
            if gradient is None or (counts and not counts[self.index]):
                sums[parameter] = torch.zeros_like(parameter)
            else:
                sums[parameter] = gradient.detach()
        if counts:
            torch._foreach_mul_(list(sums.values()), counts[self.index])
        if self._recheck:
            factor = counts[self.index] if counts else 1
            self._recheck.add(self._loader.step, self.index, sums.values(), factor)
        self._used.clear()
        # the tree says when two sums are added, so the order does not depend on the number of processes
        joins = _push_node(self._nodes, range(self.index, self.index + 1))
        for _ in range(joins):
            left = self._sums.pop()
            torch._foreach_add_(list(sums.values()), [left[parameter] for parameter in sums])
        self._sums.append(sums)

    def _average(self, total: int, buffer_shard: int) -> None:
        """Set the gradients to the means over all shards, and the buffers to those of one shard. _end_step()
        calls it on every rank. total: by which the sums are divided."""
        parts = self._sums
        self._sums = []
        self._nodes = []
        if self.world_size > 1:
            self._add_over_ranks(parts)
            buffers = [buffer.holder.get(buffer.name) for buffer in self._buffers]
            # the buffers come from the rank that has computed this shard
            _broadcast([buffer for buffer in buffers if buffer is not None], self.find_owner(buffer_shard))
        sums = parts[0]
        torch._foreach_div_(list(sums.values()), total)  # a power of two, and exact, if none was removed
        for parameter, gradient in sums.items():
            earlier = self._earlier.pop(parameter, None)
            if earlier is not None:
                gradient.add_(earlier)
            parameter.grad = gradient

    def _add_over_ranks(self, parts: list[_Sums]) -> None:
        """Add the nodes of all ranks, and write the sums into the first part, on every rank. parts: this
        rank's nodes."""
        # in the order of memory, which is that of the parameter on every rank
        orders = {}
        for parameter in parts[0]:
            dimensions = range(parameter.dim())
            orders[parameter] = sorted(dimensions, key=parameter.stride, reverse=True)
        ordered = []
        for sums in parts:
            ordered.append([sums[parameter].permute(order) for parameter, order in orders.items()])
        places = {id(result): place for place, result in enumerate(ordered[0])}
        # a few large messages: one for each parameter would cost a round trip each
        for results in torch._utils._take_tensors(ordered[0], _FLAT):
            sent = []
            for part in ordered:
                sent.extend(part[places[id(result)]].reshape(-1) for result in results)
            rows = torch.cat(sent).view(len(parts), -1)
            total = self._sum_over_ranks(rows)
            sizes = [result.numel() for result in results]
            for result, piece in zip(results, total.split(sizes), strict=True):
                result.copy_(piece.view_as(result))

    def _sum_over_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum [n] of the nodes of all ranks in the tree. rows: the sums of the nodes of this rank,
        [nodes, n].

        The columns are divided among the ranks. Each rank gets its columns from all ranks, adds them, and
        sends the sum to all: with one node for each rank the volume of all_reduce.
        """
        size = self.world_size
        nodes_of_ranks = [list_nodes(part_of(self.count, rank, size)) for rank in range(size)]
        slices = rows.tensor_split(size, dim=1)  # the columns that each rank adds
        widths = [columns.shape[1] for columns in slices]
        own_width = widths[ranks.rank()]
        sent = torch.cat([columns.reshape(-1) for columns in slices])
        sent_sizes = [len(rows) * width for width in widths]
        received_sizes = [len(nodes) * own_width for nodes in nodes_of_ranks]
        received = rows.new_empty(sum(map(len, nodes_of_ranks)), own_width)
        with ranks.waiting():
            torch.distributed.all_to_all_single(received.view(-1), sent, received_sizes, sent_sizes)
        # the rows are in the order of the shards: two are added when their nodes are joined in the tree
        sums: list[torch.Tensor] = []
        tree: list[range] = []
        for node, row in zip(itertools.chain.from_iterable(nodes_of_ranks), received, strict=True):
            sums.append(row)
            joins = _push_node(tree, node)
            for _ in range(joins):
                right = sums.pop()
                sums[-1].add_(right)
        # the sum of this slice goes to every rank
        total = rows.new_empty(sum(widths))
        with ranks.waiting():
            torch.distributed.all_to_all_single(total, sums[0].repeat(size), widths, [own_width] * size)
        return total


class _Buffer(NamedTuple):
    """A buffer of a module, and its value at some time. holder: the dictionary of the module's buffers.
    tensor: the buffer when the step began."""

    holder: dict[str, torch.Tensor | None]
    name: str
    tensor: torch.Tensor | None
    value: torch.Tensor | None


def _list_buffers(modules: Iterable[torch.nn.Module]) -> list[_Buffer]:
    """Return the buffers of these modules, with copies of their present values."""
    buffers = [
        _Buffer(module._buffers, name, tensor, None)
        for module in modules
        for name, tensor in module._buffers.items()
        if tensor is None or is_dense(tensor)
    ]
    return _read(buffers)


def _read(buffers: list[_Buffer]) -> list[_Buffer]:
    """Return the buffers with copies of their present values."""
    present = []
    for buffer in buffers:
        value = buffer.holder.get(buffer.name)
        present.append(buffer._replace(value=None if value is None else value.detach().clone()))
    return present


def _write(buffers: list[_Buffer]) -> None:
    """Set the values, if possible in the tensors of the begin of the step: others may refer to them.
    add() calls it: each shard begins with the buffers of the begin of the step."""
    for holder, name, tensor, value in buffers:
        holder[name] = value
        if tensor is not None and value is not None and tensor.shape == value.shape:
            tensor.data.copy_(value)
            holder[name] = tensor


def _find_buffer_shard(counts: tuple[int, ...]) -> int:
    """Return the shard whose buffers the model has after the step: the first one with a sample. counts: see
    _count_samples(); without any it is shard 0."""
    return next((shard for shard, count in enumerate(counts) if count), 0)


def _broadcast(tensors: list[torch.Tensor], source: int) -> None:
    """Copy one rank's values into the tensors of every rank, which are sent as few flat ones [n]."""
    for part in torch._utils._take_tensors(tensors, _FLAT):
        flat = torch.cat([tensor.reshape(-1) for tensor in part])
        with ranks.waiting():
            torch.distributed.broadcast(flat, source)
        pieces = flat.split([tensor.numel() for tensor in part])
        for tensor, piece in zip(part, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))


def _fix_settings(device: torch.device) -> None:
    """Set what the sums inside an operator depend on, for this process: one thread on the CPU, deterministic
    algorithms on a GPU. It comes before the model is built. device: that of the model."""
    convolution.protect()
    torch.set_num_threads(1)
    if device.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first call of cuBLAS
        torch.use_deterministic_algorithms(True)


def _check_settings() -> None:
    """Raise BadInput if the job has changed a setting since _fix_settings()."""
    settings = {
        "torch.get_num_threads()": (torch.get_num_threads(), 1),
        "torch.backends.cudnn.benchmark": (torch.backends.cudnn.benchmark, False),
    }
    for name, (value, expected) in settings.items():
        if value != expected:
            raise BadInput(f"--exact_shards: {name} is {value}, expected {expected}")


def _count_collectives() -> int:
    """Return the number of collectives so far; 0 if this version of torch does not count them."""
    group: Any = torch.distributed.distributed_c10d._get_default_group()
    try:
        return group._get_sequence_number_for_group()
    except RuntimeError:
        return 0
