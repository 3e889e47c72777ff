"""Find ranks that train different weights, by digests that are compared after a save.

A digest is computed on the device and sent with the flags of the next step (nonfinite.py). Only a step with a
report or a save has a further collective.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from bootfile.exact.digest import add_bytes, leaves
from bootfile.exact.due import Due
from bootfile.exact.plugins import Parts, Plugin
from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from bootfile.processes import ranks

_BITS = 24  # that float32 holds exactly
_SIZE = 12  # numbers of a step
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))  # in a state, besides tensors
_STATISTICS = ("running_mean", "running_var")  # BatchNorm has them, also in an average of the weights


class _Note(NamedTuple):
    """What was digested after a step: of the parameters, the buffers, and the states of other objects.
    digests: int64 [n] each, those of the states on the CPU."""

    step: int
    names: list[list[str]]
    digests: list[torch.Tensor]


class Replicas(Plugin):
    """The weights, buffers and states that all ranks of a job have in common.

    The modules that a checkpoint holds are compared, and at a save also the states of objects that are
    neither modules nor optimizers. The receipt has the samples of its rank, and is left out.
    Sharded parameters are left out, and so are statistics of a BatchNorm that is not synchronised, and
    buffers that DistributedDataParallel sends in each forward pass.
    """

    def __init__(self) -> None:
        self._noted: _Note | None = None
        self._unsent: torch.Tensor | None = None  # the numbers of a note, until a step has sent them
        self._due = 0  # the last step with a report or a save

    def begin(self, parts: Parts, step: int) -> None:
        self._parts = parts
        self._objects = parts.state.objects
        self._warn = parts.say_once
        forward = getattr(parts.forward, "_orig_mod", parts.forward)  # torch.compile wraps the module
        self._wrapper = forward if isinstance(forward, DistributedDataParallel) else None
        parts.before_save.append(self._compare_before_save)
        parts.after_evaluation.append(self._compare_now)

    def _check_backward(self) -> None:
        """Raise BadInput if DistributedDataParallel waits for gradients after a backward(): the other ranks
        would wait in this step for ever."""
        if self._wrapper is None:
            return
        try:
            # after a whole backward() DistributedDataParallel waits for nothing, and this returns at once
            self._wrapper.reducer._check_reducer_finalized()
        except RuntimeError:
            module = self._wrapper.module
            # a rank that would wait in the next collective ends here instead, with the names
            names = []
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and parameter.grad is None:
                    names.append(name)
            raise BadInput(
                f"rank {ranks.rank()}: {', '.join(names[:3]) or 'a layer that was replaced'} got no gradient "
                f"in this step ({len(names)} in all), and DistributedDataParallel waits for it: use each "
                "parameter on each rank, or give it find_unused_parameters=True; replace layers before"
            ) from None

    def numbers(self) -> torch.Tensor:
        """Return what note() has computed, for each vote of the next step; else numbers that compare nothing,
        of the same size: one rank may have gradients of more parameters than another."""
        self._check_backward()
        # every rank sends as many numbers in each step: the collective needs one size
        return self._nothing() if self._unsent is None else self._unsent

    def judge(self, maxima: list[float]) -> None:
        """Raise BadInput if parameters differ between ranks, and warn of buffers and states that differ."""
        if not _agree(maxima):
            self._find_difference()

    def ended(self, step: int, due: Due) -> None:
        """Compare the ranks if this step reports or saves. Raises as judge()."""
        position = self._parts.position
        self._unsent = None  # the votes of this step have sent it
        if self._parts.guard.has_more:  # the first step, or a layer that was frozen until now
            self._note(step)
        # one more collective, so only in steps that report or save; the others go without
        if due.report or due.save or position.is_stopping:
            self._compare_steps(step, position.waits)

    def _compare_before_save(self, step: int) -> None:
        if self._parts.position.is_stopping or step == self._parts.loader.total_steps:  # no step follows
            self._compare_now(step)
        else:  # the votes of the next step carry the digests: a save needs no collective of its own
            self._note(step)

    def _note(self, step: int) -> None:
        """Compute the digests after a step. The votes of the next step send them. The host does not wait."""
        self._unsent = self._digest(step)

    def _compare_now(self, step: int) -> None:
        """Compare the ranks in a collective of its own, because no step follows, or an evaluation took long.

        Called on every rank. Raises as judge().
        """
        self._unsent = None
        self.judge(ranks.maxima(self._digest(step)))

    @torch.no_grad()
    def _digest(self, step: int) -> torch.Tensor:
        """Return digests of the parameters, the buffers and the states for an all_reduce with MAX, float32
        [12], without synchronising, if no other object has tensors on the device. One that is the same on all
        ranks has a maximum and a minimum that are equal: so each number is there with both signs."""
        device = self._device()
        names = []
        digests = []
        # separate digests: parameters that differ end the run, buffers and states only bring a warning
        for find in (_named_parameters, self._named_buffers):
            tensors = dict(self._tensors(find))
            digest = torch.zeros(0, dtype=torch.int64, device=device)
            if tensors:
                digest = torch.stack([ranks.digest(tensor).to(device) for tensor in tensors.values()])
            names.append(list(tensors))
            digests.append(digest)
        states = {}
        if step == self._due:  # a save: until then the loop may make them equal
            states = self._digest_states()
        names.append(list(states))
        of_states = torch.tensor(list(states.values()), dtype=torch.int64)
        # kept on this rank: it is sent only if the sums below show a difference
        self._noted = _Note(step, names, [*digests, of_states])
        sums = [_add_in_order(digest) for digest in digests]
        # the host would wait for a copy of its sum to the device; a number that fills a tensor is sent along
        sums.append(torch.full((), _add_in_order(of_states).item(), dtype=torch.int64, device=device))
        # a sum of 64 bits in numbers of float32, which travel with the losses and hold 24 bits each
        whole = torch.stack(sums)
        numbers = torch.cat([whole, whole >> _BITS])
        numbers = numbers - (numbers >> _BITS) * 2**_BITS  # the low bits
        return torch.cat([numbers, -numbers]).float()

    def _nothing(self) -> torch.Tensor:
        return torch.full((_SIZE,), -torch.inf, device=self._device())

    def _device(self) -> torch.device:
        return accelerator.device_of(self._objects["model"])

    def _compare_steps(self, step: int, waits: bool) -> None:
        """Raise BadInput if only some ranks took the optimizer step. Call it on every rank, after a step with
        a report or a save. waits: whether gradients wait for the optimizer step."""
        self._due = step
        # the minimum is the negated maximum of the negated numbers: one collective says whether all are equal
        high, low = ranks.maxima(torch.tensor([float(waits), -float(waits)], device=self._device()))
        if high != -low:
            raise BadInput(
                f"not all ranks took the optimizer step of step {step} (rank {ranks.rank()}: {not waits}): "
                "decide by a value that is equal on all ranks, as that of checkpoint.accepts(loss)"
            )

    def _find_difference(self) -> None:
        """Find which tensor differs, after the maxima have shown that one does. All ranks send the digests of
        their tensors. Raises BadInput for a parameter, and warns of a buffer, and of each state."""
        assert self._noted is not None
        step, names, digests = self._noted
        # all ranks come here: each has seen the same maxima
        of_ranks = ranks.gather_objects([digest.tolist() for digest in digests])
        # compared with rank 0, whose tensors a checkpoint holds
        for place, name in enumerate(names[0]):
            rank = _find_other_rank(of_ranks, 0, place)
            if rank:
                line = f"{name} of rank {rank} is not that of rank 0 after step {step}: {_OF_WEIGHTS}"
                raise BadInput(line)
        for place, name in enumerate(names[1]):
            rank = _find_other_rank(of_ranks, 1, place)
            if rank:
                line = f"{name} of rank {rank} is not that of rank 0 after step {step}: {_OF_BUFFERS}"
                self._warn(f"warning: {line}", "buffers")
                break
        for place, name in enumerate(names[2]):
            rank = _find_other_rank(of_ranks, 2, place)
            if rank:
                line = f"{name} of rank {rank} is not that of rank 0 after step {step}: {_OF_STATES}"
                self._warn(f"warning: {line}", f"state of {name}")

    def _digest_states(self) -> dict[str, int]:
        """Return a digest of the state of each object that is neither a module nor an optimizer, by its name.
        A checkpoint holds that of rank 0; this also computes those of the other ranks."""
        digests = {}
        for name, value in self._objects.items():
            if value is None or name == "receipt":
                continue
            if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
                continue
            digests[name] = 0
            # an object of the user may have no state on this rank: a save asks rank 0 only, and raises there
            with contextlib.suppress(Exception):
                digests[name] = _digest_state(name, value.state_dict())
        return digests

    def _tensors(
        self, find: Callable[[str, torch.nn.Module], Iterator[Any]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and the plain tensors that `find` yields for each module."""
        for prefix, module in self._objects.items():
            if not isinstance(module, torch.nn.Module):
                continue
            for name, tensor in find(prefix, module):
                if _is_whole(tensor):
                    yield f"{prefix}.{name}", tensor

    def _named_buffers(self, prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        # each forward pass overwrites these with rank 0's
        if prefix == "model" and self._wrapper and self._wrapper.broadcast_buffers:
            return
        for path, part in module.named_modules():
            if isinstance(part, _NormBase) and not _is_synchronised(part):
                continue  # statistics of the rank's own samples
            for name, buffer in part._buffers.items():
                if buffer is not None and name not in part._non_persistent_buffers_set:
                    yield f"{path}.{name}".lstrip("."), buffer


def _digest_state(name: str, state: dict[str, Any]) -> int:
    """Return a digest of the numbers, texts and tensors in a state, at least 0, of 56 bits."""
    texts = []
    for path, leaf in leaves({name: state}):
        if path.endswith(_STATISTICS):  # the rank's own samples made them, as in the model
            continue
        if _is_whole(leaf):
            content = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
            texts.append(f"{path} {leaf.dtype} {list(leaf.shape)} {add_bytes(content).item()}")
        elif isinstance(leaf, set):  # its order differs from process to process
            texts.append(f"{path} {sorted(map(repr, leaf))}")
        elif isinstance(leaf, _PLAIN):
            texts.append(f"{path} {leaf!r}")
    # the order of a dictionary does not count
    whole = hashlib.blake2b("\0".join(sorted(texts)).encode(), digest_size=7)
    return int.from_bytes(whole.digest(), "big")


def _is_whole(value: Any) -> bool:
    """Return whether a value is a tensor with whole bytes on this rank: no sharded, sparse or meta tensor."""
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and value.layout == torch.strided and not value.is_meta


def _is_synchronised(layer: torch.nn.Module) -> bool:
    """Return whether a BatchNorm has the statistics of all ranks: torch's SyncBatchNorm, or one like it."""
    return hasattr(layer, "process_group") and layer.process_group in (None, torch.distributed.group.WORLD)


def _named_parameters(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return module.named_parameters()


def _add_in_order(digests: torch.Tensor) -> torch.Tensor:
    """Return the sum of digests, int64 [n] -> [], each with another odd weight: their order counts."""
    # without weights, two tensors that were exchanged would have the same sum
    weights = 2 * torch.arange(len(digests), device=digests.device) + 1
    return (digests * weights).sum()


def _agree(maxima: list[float]) -> bool:
    """Return whether all ranks have sent the same numbers, or none.

    maxima: over all ranks, of each number and then of each number with the other sign.
    """
    half = len(maxima) // 2
    for highest, negated_lowest in zip(maxima[:half], maxima[half:], strict=True):
        if highest not in (-negated_lowest, -math.inf):
            return False
    return True


def _find_other_rank(of_ranks: list[list[list[int]]], part: int, place: int) -> int:
    """Return the first rank whose digest of a tensor is not that of rank 0, or that has no such tensor; 0 if
    all are equal. of_ranks: of each rank, the digests of the parameters, the buffers and the states."""
    values = [digests[part][place : place + 1] for digests in of_ranks]  # [] if the rank has fewer tensors
    for rank, value in enumerate(values):
        if value != values[0]:
            return rank
    return 0


_OF_WEIGHTS = (
    "DistributedDataParallel averages the gradients of forward(inputs), not of model(inputs), and only of "
    "parameters that it was built with and that were not frozen then"
)
_OF_BUFFERS = (
    "a checkpoint holds that of rank 0, so a restart is not exact. Make it equal with "
    "torch.distributed.all_reduce(), or set forward.broadcast_buffers = True"
)
_OF_STATES = (
    "a checkpoint holds that of rank 0, so a restart is not exact. Make what it holds equal with "
    "torch.distributed.all_reduce()"
)
