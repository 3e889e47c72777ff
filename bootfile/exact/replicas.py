"""Find ranks that train different weights, by digests that are compared after the first step and each save.

Compared are the parameters and buffers of the modules that a checkpoint holds: a parameter that differs ends
the run, a buffer is a warning. The digest is computed on the device and sent with the vote of the next step
(nonfinite.py). Outside: sharded parameters, statistics of a BatchNorm that is not synchronised, buffers that
DistributedDataParallel sends in each forward pass, and states of other objects: a checkpoint holds those of
rank 0.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from bootfile.exact.due import Due
from bootfile.exact.plugins import Parts, Plugin
from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from bootfile.processes import ranks

_BITS = 24  # that float32 holds exactly
_SIZE = 8  # numbers of a vote


class _Note(NamedTuple):
    """What was digested after a step: the parameters, and the buffers. digests: int64 [n] each."""

    step: int
    names: list[list[str]]
    digests: list[torch.Tensor]


class Replicas(Plugin):
    """The weights and buffers that all ranks of a job have in common."""

    def __init__(self) -> None:
        self._noted: _Note | None = None
        self._unsent: torch.Tensor | None = None  # the numbers of a note, until a step has sent them

    def begin(self, parts: Parts, step: int) -> None:
        self._parts = parts
        self._device = accelerator.device_of(parts.model)
        forward = getattr(parts.forward, "_orig_mod", parts.forward)  # torch.compile wraps the module
        self._wrapper = forward if isinstance(forward, DistributedDataParallel) else None
        # each forward pass overwrites the buffers with rank 0's
        self._sends_buffers = self._wrapper is not None and self._wrapper.broadcast_buffers
        parts.before_save.append(self._compare_last)
        parts.after_evaluation.append(self._compare_now)

    def numbers(self) -> torch.Tensor:
        """Return the digest that was computed after the last step, or numbers that compare nothing.

        Raises BadInput if DistributedDataParallel still waits for gradients. torch itself raises only in the
        next step: a save of this step would hold weights whose gradients were never averaged.
        """
        self._check_backward()
        if self._unsent is not None:
            return self._unsent
        return torch.full((_SIZE,), -torch.inf, device=self._device)

    def _check_backward(self) -> None:
        if self._wrapper is None:
            return
        try:
            # after a whole backward() DistributedDataParallel waits for nothing, and this returns at once
            self._wrapper.reducer._check_reducer_finalized()
        except RuntimeError:
            parameters = self._wrapper.module.named_parameters()
            names = [name for name, value in parameters if value.requires_grad and value.grad is None]
            raise BadInput(
                f"rank {ranks.rank()}: {', '.join(names[:3]) or 'a layer that was replaced'} got no gradient "
                f"in this step ({len(names)} in all), and DistributedDataParallel waits for it: use each "
                "parameter on each rank, or give it find_unused_parameters=True; replace layers before"
            ) from None

    def judge(self, maxima: list[float]) -> None:
        """Raise BadInput if parameters differ between ranks, and warn of a buffer that differs. maxima: over
        all ranks, of each number and then of each number with the other sign."""
        half = len(maxima) // 2
        for highest, negated_lowest in zip(maxima[:half], maxima[half:], strict=True):
            if highest not in (-negated_lowest, -math.inf):
                self._find_difference()
                return

    def ended(self, step: int, due: Due) -> None:
        self._unsent = None  # the votes of this step have sent it
        position = self._parts.position
        # one more collective, in steps that report or save, or would save if no gradients waited on this rank
        if due.report or due.save or position.save_is_late or position.is_stopping:
            self._compare_steps(step, position.waits)
        # at a save, after the first step, or if a layer was frozen until now; also on a rank that takes no
        # optimizer step. The votes of the next step carry it: no collective of its own
        if due.save or self._parts.guard.has_more:
            self._unsent = self._digest(step)

    def _compare_steps(self, step: int, waits: bool) -> None:
        """Raise BadInput, on every rank, if only some ranks took the optimizer step. waits: it is missing
        here."""
        # the minimum is the negated maximum of the negated numbers: one collective says whether all are equal
        high, low = ranks.maxima(torch.tensor([float(waits), -float(waits)], device=self._device))
        if high != -low:
            raise BadInput(
                f"not all ranks took the optimizer step of step {step} (rank {ranks.rank()}: {not waits}): "
                "decide by a value that is equal on all ranks, as that of checkpoint.accepts(loss)"
            )

    def _compare_last(self, step: int) -> None:
        """Compare before a save that no step follows."""
        if self._parts.position.is_stopping or step == self._parts.loader.total_steps:
            self._compare_now(step)

    def _compare_now(self, step: int) -> None:
        """Compare the ranks in a collective of its own, on every rank. Raises as judge()."""
        self._unsent = None
        self.judge(ranks.maxima(self._digest(step)))

    @torch.no_grad()
    def _digest(self, step: int) -> torch.Tensor:
        """Return digests of parameters and buffers for an all_reduce with MAX, float32 [8]: each with both
        signs, so that equal ones have a maximum and a minimum that are equal. The host does not wait."""
        tensors = [dict(self._list_parameters()), dict(self._list_buffers())]
        digests = []
        for part in tensors:
            values = [ranks.digest(tensor).to(self._device) for tensor in part.values()]
            nothing = torch.zeros(0, dtype=torch.int64, device=self._device)
            digests.append(torch.stack(values) if values else nothing)
        # kept on this rank: it is sent only if the sums below show a difference
        self._noted = _Note(step, [[*part] for part in tensors], digests)
        # a sum of 64 bits in numbers of float32, which travel with the losses and hold 24 bits each
        whole = torch.stack([_add_in_order(digest) for digest in digests])
        numbers = torch.cat([whole, whole >> _BITS])
        numbers = numbers - (numbers >> _BITS) * 2**_BITS  # the low bits
        return torch.cat([numbers, -numbers]).float()

    def _find_difference(self) -> None:
        """Find which tensor differs, on all ranks, after the maxima have shown that one does. Raises BadInput
        for a parameter, and warns of a buffer."""
        assert self._noted is not None
        step, names, digests = self._noted
        digests_of_ranks = ranks.gather_objects([digest.tolist() for digest in digests])
        for part, names_of_part in enumerate(names):
            for place, name in enumerate(names_of_part):
                # compared with rank 0, whose tensors a checkpoint holds; [] if a rank has fewer tensors
                values = [digests_of_rank[part][place : place + 1] for digests_of_rank in digests_of_ranks]
                rank = next((rank for rank, value in enumerate(values) if value != values[0]), None)
                if rank is None:
                    continue
                line = f"{name} of rank {rank} is not that of rank 0 after step {step}"
                if part == 0:
                    raise BadInput(f"{line}: {_OF_WEIGHTS}")
                self._parts.say_once(f"warning: {line}: {_OF_BUFFERS}", "buffers")
                return

    def _list_modules(self) -> list[tuple[str, torch.nn.Module]]:
        objects = self._parts.state.objects.items()
        return [(name, value) for name, value in objects if isinstance(value, torch.nn.Module)]

    def _list_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, module in self._list_modules():
            for path, parameter in module.named_parameters():
                if is_whole(parameter):
                    yield f"{name}.{path}", parameter

    def _list_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, module in self._list_modules():
            if name == "model" and self._sends_buffers:
                continue
            for path, part in module.named_modules():
                if isinstance(part, _NormBase) and not _is_synchronised(part):
                    continue  # statistics of the rank's own samples
                for key, buffer in part._buffers.items():
                    is_saved = key not in part._non_persistent_buffers_set
                    if buffer is not None and is_saved and is_whole(buffer):
                        yield f"{name}.{path}.{key}".replace("..", "."), buffer


def is_whole(value: Any) -> bool:
    """Return whether a value is a tensor with whole bytes on this rank: no sharded, sparse or meta tensor."""
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and value.layout == torch.strided and not value.is_meta


def _is_synchronised(layer: torch.nn.Module) -> bool:
    """Return whether a BatchNorm has the statistics of all ranks: torch's SyncBatchNorm, or one like it."""
    return hasattr(layer, "process_group") and layer.process_group in (None, torch.distributed.group.WORLD)


def _add_in_order(digests: torch.Tensor) -> torch.Tensor:
    """Return the sum of digests, int64 [n] -> [], each with another odd weight: their order counts."""
    # without weights, two tensors that were exchanged would have the same sum
    weights = 2 * torch.arange(len(digests), device=digests.device) + 1
    return (digests * weights).sum()


_OF_WEIGHTS = (
    "each rank has to take the same optimizer steps, and DistributedDataParallel averages the gradients of "
    "forward(inputs), not of model(inputs), and only of parameters that it was built with and that were not "
    "frozen then"
)
_OF_BUFFERS = (
    "a checkpoint holds that of rank 0, so a restart is not exact. Make it equal with "
    "torch.distributed.all_reduce(), or set forward.broadcast_buffers = True"
)
