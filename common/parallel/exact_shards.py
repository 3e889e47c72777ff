"""The same bits on any number of processes: a step is V shards, and their sum has one fixed order.

A sum of floats depends on the order of its additions, and that of all_reduce depends on the number of
processes. Here the global batch always consists of V shards, each with a forward and a backward pass, a
gradient and random numbers of its own. A process computes neighbouring shards one after the other, about
V / N, and all gradients are added in one binary tree over the shards:

    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))    the lower additions within a process, the upper ones between

N need not divide V. With 3 processes and V = 8 the second one has the shards 2, 3 and 4, and sends two sums,
of 2 + 3 and of 4. A process sends at most 2 log2(V) - 2 sums, and one if N divides V.

Related work: M. Li et al., "EasyScale", SC '23, whose virtual workers move between GPUs.
"""

import contextlib
import functools
import itertools
import os
import random
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bootfile.exact.processes import Processes
from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from bootfile.ground.numbers import part_of
from bootfile.machine import convolution
from bootfile.processes import ranks
from common.parallel.shard_guards import Call, check_settings, count_collectives, is_dense, list_variables

HELP = "shards of a step, a power of two: the same bits on any number of processes up to V"
_FLAT = 2**25  # bytes that are sent together
_CHECK_EVERY = 32  # steps, see Call
_Sums = dict[torch.Tensor, torch.Tensor]  # parameter -> gradient


def list_nodes(shards: range) -> list[range]:
    """Return the largest nodes of the binary tree that cover neighbouring shards, in their order."""
    nodes = list[range]()
    for shard in shards:
        _append(nodes, range(shard, shard + 1))
    return nodes


def _append(nodes: list[range], node: range) -> int:
    """Append a node, and join the last two while they are the halves of one node of the tree. Return how
    often two were joined."""
    nodes.append(node)
    before = len(nodes)
    while len(nodes) > 1:
        left, right = nodes[-2:]
        if len(left) != len(right) or left.start % (2 * len(left)):
            break
        nodes[-2:] = [range(left.start, right.stop)]
    return before - len(nodes)


def sum_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows, [n, ...] -> [...], in the binary tree over them; n is a power of two. The
    rows are overwritten."""
    distance = 1
    while distance < len(rows):
        rows[:: 2 * distance].add_(rows[distance :: 2 * distance])
        distance *= 2
    return rows[0]


class Shards:
    """The shards of each step, whose gradients are added in one fixed binary tree.

    count: V, of a step, over all processes. device: that of the model. Operators use one thread on the CPU,
    and deterministic algorithms on a GPU. Raises BadInput if V is not a power of two, or less than the number
    of processes.
    `local`: number of shards of this process. `index`: the shard that is computed now, 0..V-1.
    `is_repeating`: whether modules are called to compare their results, see Call.
    """

    is_repeating: ClassVar[bool] = False
    _hook: ClassVar[Any] = None  # of all optimizers; a process has one
    _finder: ClassVar[Any] = None  # a hook of all modules, from a forward pass to add()

    def __init__(self, count: int, device: torch.device):
        self.count, self.world_size, self._device = count, ranks.world_size(), device
        if count & (count - 1) or count < self.world_size:
            if ranks.is_initialized():  # a rank that leaves before the others are connected is their error
                torch.distributed.barrier()
            raise BadInput(
                f"--exact_shards {count}: expected a power of two, and a shard for each of the "
                f"{self.world_size} processes"
            )
        own = part_of(count, ranks.rank(), self.world_size)
        self.local, self.first, self.index = len(own), own.start, own.start
        self._nodes: list[range] = []  # nodes of the tree whose gradients are in _sums
        self._sums: list[_Sums] = []
        self._earlier: _Sums = {}  # gradients from before the step, as in an accumulation
        self._used: set[torch.Tensor] = set()  # parameters with a gradient of this shard
        self._hooked: dict[torch.Tensor, Any] = {}  # parameter -> handle of its hook
        self._losses: list[torch.Tensor] = []
        self._buffers: list[_Buffer] = []  # before the step
        self._after: list[_Buffer] = []  # after the first shard
        self._before: list[_Buffer] = []  # before the last step that was begun
        self._processes: Processes | None = None  # those of the run
        self._is_open = False  # from the forward pass of a shard until add()
        self._steps = self._collectives = 0
        convolution.protect()
        torch.set_num_threads(1)  # the sums inside an operator depend on the number of threads
        if device.type != "cpu":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first call of cuBLAS
            torch.use_deterministic_algorithms(True)

    def attach(self, forward: Any) -> None:
        """Add the gradients of a DistributedDataParallel in the tree. Call it once, before the first step.
        Raises BadInput if `forward` is another wrapper, such as FSDP."""
        if type(forward) is not DistributedDataParallel:
            name = type(forward).__name__
            raise BadInput(f"--exact_shards: expected a DistributedDataParallel (not FSDP), got {name}")
        self._forward = forward
        forward.exact_shards = self  # type: ignore[assignment]
        forward.require_backward_grad_sync = False  # as no_sync(): add() sends
        forward.broadcast_buffers = forward.find_unused_parameters = forward.static_graph = False
        forward.register_forward_pre_hook(self._begin)  # not of the module, which may be copied
        forward.register_forward_hook(self._end_forward)
        self._calls = [Call("the model", forward, forward.module)]
        self.watch({})
        self.stop_finding()
        if Shards._hook:  # of an earlier run in this process, as in a notebook
            Shards._hook.remove()
        Shards._hook = register_optimizer_step_pre_hook(self._check_optimizer)

    def watch(self, objects: dict[str, Any], loader: Any = None, processes: Processes | None = None) -> None:
        """Treat the modules and the optimizers among these objects as those of the model: a shard begins with
        their buffers, and the gradients of what they train are added. The Checkpointer calls it.

        loader: that of the training, which hands out a shard as a batch. processes: those of the run; they
        may stop a step between two shards.
        """
        self._processes = processes
        modules = {name: each for name, each in objects.items() if isinstance(each, torch.nn.Module)}
        parts = dict.fromkeys(self._forward.module.modules())
        self._calls += [Call(name, each, each) for name, each in modules.items() if each not in parts]
        others = itertools.chain.from_iterable(each.modules() for each in modules.values())
        self._modules = list(dict.fromkeys([*parts, *others]))
        self._known = {self._forward, *self._modules}
        self._optimizers = [each for each in objects.values() if isinstance(each, torch.optim.Optimizer)]
        self._criterion = objects.get("criterion")
        self._loader, self._buffers, self._is_open = loader, [], False

    @torch.no_grad()
    def add(self, loss: torch.Tensor) -> torch.Tensor | None:
        """End a shard after its backward(). Return None if another shard of the step follows.

        After the last one the gradients are the means over all shards, and the buffers are those of shard 0.
        Then the result is the mean loss of all shards, equal on all ranks. loss: scalar, the mean over the
        shard. A parameter without a gradient has the gradient 0. Gradients from before the step, as in an
        accumulation, are added to the means.
        """
        if self.stop_finding():
            now = list_variables(self._criterion)
            if name := next((name for name in now if now[name] != self._variables.get(name)), ""):
                raise BadInput(
                    f"--exact_shards: the criterion changes its variable {name} in a shard: expected a "
                    "module with its state in buffers (register_buffer), with which each shard begins"
                )
        if self._processes:
            self._processes.check()
        if not self._is_open:
            raise BadInput("--exact_shards: shards.add() without forward(inputs): call forward, not model")
        if self._collectives != count_collectives():
            raise BadInput("--exact_shards: the model or the criterion communicates with other processes")
        self._losses.append(accelerator.double(loss.detach()).squeeze())
        done = len(self._losses)
        is_last = done == self.local
        if done == 1:
            self._after = _read(self._buffers)
            self._step = self._loader.step if self._loader else 0
        if self._loader and self._loader.step != self._step:
            raise BadInput("--exact_shards: expected one shards.add() for each batch of the training loader")
        self._keep_gradients()
        if is_last and self._is_checked:
            self._repeat_calls()
        _write(self._after if is_last else self._buffers)
        self.index, self._is_open = self.first + done % self.local, False
        if not is_last:
            self._collectives = count_collectives()
            return None
        self._average()
        rows, self._losses, self._buffers = self._make_rows(self._losses), [], []
        if self.world_size > 1:
            torch.distributed.all_reduce(rows)
        self._steps += 1
        return sum_rows(rows) / self.count

    def undo(self) -> None:
        """Set the buffers to their values before the last step that was begun."""
        _write(self._before)

    def detach(self) -> None:
        """Remove all hooks: those of parameters, to which DistributedDataParallel refers in C++, would keep
        the model in memory."""
        self.stop_finding()
        for handle in (*self._hooked.values(), Shards._hook):
            handle.remove()
        Shards._hook = None

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows [V, n] of all shards on every process. Of the given rows only this process's count;
        all_reduce adds zeros to them, so nothing is rounded."""
        part = slice(self.first, self.first + self.local)
        whole = torch.zeros_like(rows)
        whole[part] = rows[part]
        if self.world_size > 1:
            torch.distributed.all_reduce(whole)
        return whole

    def rows(self, evaluate: Callable[[Iterable], torch.Tensor], loader: Any) -> torch.Tensor:
        """Return evaluate(batches), sums [n], for each part of a loader whose sampler was split, as the rows
        of this process's shards [V, n]. The other rows are zeros: all_reduce adds them in any order."""
        check_settings()
        sampler = loader.plan.sampler
        with contextlib.closing(iter(loader)) as batches:
            counts = [len(part[:: sampler.largest]) for part in sampler.parts]
            return self._make_rows([evaluate(itertools.islice(batches, count)) for count in counts])

    def _make_rows(self, values: list[torch.Tensor]) -> torch.Tensor:
        rows = values[0].new_zeros(self.count, *values[0].shape)
        rows[self.first : self.first + self.local] = torch.stack(values)
        return rows

    def _begin(self, *_: Any) -> None:
        """Begin a shard with its first forward pass; the first shard remembers the buffers."""
        check_settings()
        if not self._buffers:
            self._buffers = self._before = _list_buffers(self._modules)
        if self._is_open or not torch.is_grad_enabled():
            return
        self._is_open = True
        if self._losses:
            return
        self._collectives = count_collectives()
        for parameter in self._list_trained():
            if parameter not in self._hooked:
                hook = functools.partial(self._note_gradient, parameter)
                self._hooked[parameter] = parameter.register_hook(hook)
        self._is_checked = self._steps < 2 or self._steps % _CHECK_EVERY == 0
        of_device = [accelerator.of(self._device)] * (self._device.type != "cpu")
        own = [each.value for each in self._loader.generators] if self._loader else []
        self._sources = [torch, random, np.random, *of_device, *own]
        for call in self._calls if self._is_checked else ():
            call.sources = self._sources

    def _end_forward(self, *_: Any) -> None:
        if self._is_open and self._is_checked and not Shards._finder:
            self._variables = list_variables(self._criterion)
            Shards._finder = register_module_forward_pre_hook(self._find_module)

    @staticmethod
    def stop_finding() -> bool:
        """Remove the hook of all modules, and return whether there was one: a step may end with an error."""
        finder, Shards._finder = Shards._finder, None
        if finder:
            finder.remove()
        return finder is not None

    def _find_module(self, module: torch.nn.Module, _: Any) -> None:
        """Check a module that the loop calls and no checkpoint holds, from its next call on."""
        if self._is_open and torch.is_grad_enabled() and module not in self._known:
            self._known.update(module.modules())
            self._calls.append(Call(type(module).__name__, module, module))
            self._calls[-1].sources = self._sources

    def _list_trained(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients are added, in the same order on every rank."""
        groups = itertools.chain.from_iterable(each.param_groups for each in self._optimizers)
        others = itertools.chain.from_iterable(group["params"] for group in groups)
        own = dict.fromkeys([*self._forward.module.parameters(), *others])
        return [parameter for parameter in own if parameter.requires_grad]

    def _note_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Set a gradient from before the step aside: called before the first one of the step is added."""
        if gradient.layout != torch.strided:
            named = self._forward.module.named_parameters()
            name = next((name for name, each in named if each is parameter), "a parameter")
            raise BadInput(f"--exact_shards: the gradient of {name} is sparse, expected a dense one")
        if not self._losses and parameter not in self._used and parameter.grad is not None:
            self._earlier[parameter], parameter.grad = parameter.grad, None
        self._used.add(parameter)

    def _keep_gradients(self) -> None:
        """Move the gradients of a shard to the partial sums, and add the halves of nodes."""
        sums: _Sums = {}
        for parameter in self._list_trained():
            gradient, parameter.grad = parameter.grad, None
            if len(self._losses) == 1 and gradient is not None and parameter not in self._used:
                self._earlier[parameter], gradient = gradient, None
            sums[parameter] = torch.zeros_like(parameter) if gradient is None else gradient.detach()
        self._used.clear()
        for _ in range(_append(self._nodes, range(self.index, self.index + 1))):
            others = self._sums.pop()
            torch._foreach_add_(list(sums.values()), [others[each] for each in sums])
        self._sums.append(sums)

    def _average(self) -> None:
        """Set the gradients to the means over all shards, and the buffers to those of rank 0."""
        parts, self._sums, self._nodes = self._sums, [], []
        if self.world_size > 1:
            self._add_over_ranks(parts)
            buffers = [each.holder.get(each.name) for each in self._buffers]
            _broadcast([each for each in buffers if each is not None])
        sums = parts[0]
        torch._foreach_div_(list(sums.values()), self.count)  # a power of two: exact
        for parameter, gradient in sums.items():
            earlier = self._earlier.pop(parameter, None)
            parameter.grad = gradient if earlier is None else gradient.add_(earlier)

    def _add_over_ranks(self, parts: list[_Sums]) -> None:
        """Add the nodes of all ranks, and write the sums into the first part. parts: this rank's nodes."""
        # in the order of memory, which is that of the parameter on every rank
        orders = [sorted(range(each.dim()), key=each.stride, reverse=True) for each in parts[0]]
        ordered = [
            [sums[each].permute(order) for each, order in zip(parts[0], orders, strict=True)]
            for sums in parts
        ]
        places = {id(each): place for place, each in enumerate(ordered[0])}
        for results in torch._utils._take_tensors(ordered[0], _FLAT):
            own = [places[id(each)] for each in results]
            flat = torch.cat([part[place].reshape(-1) for part in ordered for place in own])
            total = self._sum_over_ranks(flat.view(len(parts), -1))
            for each, piece in zip(results, total.split([each.numel() for each in results]), strict=True):
                each.copy_(piece.view_as(each))

    def _sum_over_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum [n] of the nodes of all ranks in the tree. rows: those of this rank, [nodes, n].

        A process adds one slice, which it gets from all processes, and sends the sum to all: with one node
        for each process the volume of all_reduce.
        """
        size = self.world_size
        nodes = [list_nodes(part_of(self.count, rank, size)) for rank in range(size)]
        slices = rows.tensor_split(size, dim=1)
        sizes = [each.shape[1] for each in slices]
        own = sizes[ranks.rank()]
        sent = rows.view(-1) if len(rows) == 1 else torch.cat([each.reshape(-1) for each in slices])
        received = rows.new_empty(sum(map(len, nodes)), own)
        torch.distributed.all_to_all_single(
            received.view(-1), sent, [len(each) * own for each in nodes], [len(rows) * each for each in sizes]
        )
        sums, known = list[torch.Tensor](), list[range]()
        for node, row in zip(itertools.chain.from_iterable(nodes), received, strict=True):
            sums.append(row)
            for _ in range(_append(known, node)):
                right = sums.pop()
                sums[-1].add_(right)
        total = rows.new_empty(sum(sizes))
        torch.distributed.all_to_all_single(total, sums[0].repeat(size), sizes, [own] * size)
        return total

    def _repeat_calls(self) -> None:
        """Repeat rank 0's first call of each module in the step. If a result differs on any rank, all ranks
        raise BadInput."""
        calls = [(call.name, call.inputs, call.states, call.results) for call in self._calls]
        own = list[str]()
        for call, (name, inputs, states, results) in zip(
            self._calls, ranks.broadcast_object(calls), strict=False
        ):
            _write(self._buffers)
            Shards.is_repeating = True
            again = call.repeat(inputs, states) if name == call.name and results else {}
            Shards.is_repeating = False
            own += [f"{name}: {each}" for each in again if again[each] != results.get(each)]
            call.forget()
        if found := list(itertools.chain.from_iterable(ranks.gather_objects(own))):
            raise BadInput(
                f"--exact_shards: {found[0]} changes if a shard is computed again after others or on another "
                "process: expected state between two calls only in buffers (register_buffer) of the model, "
                "the criterion and other objects of the Checkpointer, with which each shard begins"
            )

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Raise BadInput for a step with a closure, or between two shards."""
        trained = set(self._list_trained())
        if trained.isdisjoint(each for group in optimizer.param_groups for each in group["params"]):
            return  # it trains the input, for example
        name = f"--exact_shards: {type(optimizer).__name__}.step()"
        if any(each is not None for each in (*args[1:2], kwargs.get("closure"))):
            raise BadInput(f"{name} got a closure, which sees one shard: expected an optimizer without one")
        if self._is_open or self._losses:
            raise BadInput(f"{name} between two shards: expected it after shards.add() has returned a loss")


class _Buffer(NamedTuple):
    """A buffer of a module, and its value at some time. holder: the dictionary of the module's buffers.
    tensor: the buffer when the step began."""

    holder: dict[str, torch.Tensor | None]
    name: str
    tensor: torch.Tensor | None
    value: torch.Tensor | None


def _list_buffers(modules: Iterable[torch.nn.Module]) -> list[_Buffer]:
    parts = [(each._buffers, name, tensor) for each in modules for name, tensor in each._buffers.items()]
    return _read([_Buffer(*part, None) for part in parts if part[2] is None or is_dense(part[2])])


def _read(buffers: list[_Buffer]) -> list[_Buffer]:
    """Return the buffers with copies of their present values."""
    now = [each.holder.get(each.name) for each in buffers]
    values = [None if each is None else each.detach().clone() for each in now]
    return [each._replace(value=value) for each, value in zip(buffers, values, strict=True)]


def _write(buffers: list[_Buffer]) -> None:
    """Set the values, if possible in the tensors of the begin of the step: others may refer to them."""
    for holder, name, tensor, value in buffers:
        holder[name] = value
        if tensor is not None and value is not None and tensor.shape == value.shape:
            tensor.data.copy_(value)
            holder[name] = tensor


def _broadcast(tensors: list[torch.Tensor]) -> None:
    """Copy rank 0's values into the tensors, which are sent as few flat ones [n]."""
    for part in torch._utils._take_tensors(tensors, _FLAT):
        flat = torch.cat([each.reshape(-1) for each in part])
        torch.distributed.broadcast(flat, 0)
        pieces = flat.split([each.numel() for each in part])
        for each, piece in zip(part, pieces, strict=True):
            each.copy_(piece.view_as(each))
