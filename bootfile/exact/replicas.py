"""Find ranks that train different weights, by digests that are compared after a save.

A digest is computed on the device and sent with the flags of the next step (nonfinite.py). Only a step with a
report or a save has a further collective.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from bootfile.ground.errors import BadInput
from bootfile.processes import ranks

_BITS = 24  # that float32 holds exactly
_SIZE = 8  # numbers of a note


class Replicas:
    """The weights and buffers that all ranks of a job have in common.

    objects: those of a checkpoint; their modules are compared. forward: the module that the job calls.
    warn: called with a line and its subject, of which one line is printed.
    Sharded parameters are left out, and so are statistics of BatchNorm and buffers that
    DistributedDataParallel sends in each forward pass.
    """

    def __init__(self, objects: dict[str, Any], forward: Any, warn: Callable[[str, str], object]):
        self._objects, self._warn = objects, warn
        forward = getattr(forward, "_orig_mod", forward)  # of torch.compile
        self._wrapper = forward if isinstance(forward, DistributedDataParallel) else None
        self._noted: tuple[Any, ...] = ()  # (step, names, digests of the tensors) of the last note()

    def check_backward(self) -> None:
        """Raise BadInput if DistributedDataParallel waits for gradients after a backward(): the other ranks
        would wait in this step for ever."""
        if self._wrapper is None:
            return
        try:
            self._wrapper.reducer._check_reducer_finalized()
        except RuntimeError:
            module = self._wrapper.module
            names = [
                name for name, each in module.named_parameters() if each.requires_grad and each.grad is None
            ]
            raise BadInput(
                f"rank {ranks.rank()}: {', '.join(names[:3]) or 'a layer that was replaced'} got no gradient "
                f"in this step ({len(names)} in all), and DistributedDataParallel waits for it: use each "
                "parameter on each rank, or give it find_unused_parameters=True; replace layers before"
            ) from None

    @torch.no_grad()
    def note(self, step: int) -> torch.Tensor:
        """Return digests of the parameters and the buffers for an all_reduce with MAX: float32 [8], without
        synchronising."""
        if ranks.world_size() == 1:
            return self.nothing()
        device = self.nothing().device
        named = lambda _, module: module.named_parameters()  # noqa: E731
        parts = [dict(self._tensors(each)) for each in (named, self._buffers)]
        digests = [
            torch.stack([ranks.digest(each).to(device) for each in part.values()])
            if part
            else torch.zeros(0, dtype=torch.int64, device=device)
            for part in parts
        ]
        self._noted = step, [list(part) for part in parts], digests
        whole = torch.stack(
            [(each * (2 * torch.arange(len(each), device=device) + 1)).sum() for each in digests]
        )
        numbers = torch.cat([whole, whole >> _BITS])
        numbers = numbers - (numbers >> _BITS) * 2**_BITS  # the low bits
        return torch.cat([numbers, -numbers]).float()

    def nothing(self) -> torch.Tensor:
        """Return the result of note() in a step that compares nothing. Its size is that of each step: one
        rank may have gradients of more parameters than another."""
        device = next(self._objects["model"].parameters(), torch.empty(0)).device
        return torch.full((_SIZE,), -torch.inf, device=device)

    def compare_steps(self, step: int, waits: bool) -> None:
        """Raise BadInput if only some ranks took the optimizer step. waits: whether gradients wait for it."""
        high, low = ranks.maxima(self.nothing().new_tensor([waits, -waits]))
        if high != -low:
            raise BadInput(
                f"not all ranks took the optimizer step of step {step} (rank {ranks.rank()}: {not waits}): "
                "decide by a value that is equal on all ranks, as that of checkpoint.accepts(loss)"
            )

    def compare(self, maxima: list[float]) -> None:
        """Raise BadInput if parameters differ between ranks, and warn of buffers that differ.

        maxima: those of note() over all ranks. Call it on every rank.
        """
        half = len(maxima) // 2
        if all(high in (-low, -math.inf) for high, low in zip(maxima[:half], maxima[half:], strict=True)):
            return
        step, names, digests = self._noted
        everywhere = ranks.gather_objects([each.tolist() for each in digests])
        for part, (own, line) in enumerate(zip(names, (_OF_WEIGHTS, _OF_BUFFERS), strict=True)):
            for place, name in enumerate(own):
                values = [each[part][place : place + 1] for each in everywhere]
                if others := [rank for rank, value in enumerate(values) if value != values[0]]:
                    line = f"{name} of rank {others[0]} is not that of rank 0 after step {step}: {line}"
                    if part == 0:
                        raise BadInput(line)
                    self._warn(f"warning: {line}", "buffers")
                    return

    def _tensors(
        self, of: Callable[[str, torch.nn.Module], Iterator[Any]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, module in self._objects.items():
            for name, each in of(prefix, module) if isinstance(module, torch.nn.Module) else ():
                is_plain = type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout == torch.strided
                if is_plain and not each.is_meta:
                    yield f"{prefix}.{name}", each

    def _buffers(self, prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        if prefix == "model" and self._wrapper and self._wrapper.broadcast_buffers:
            return
        for path, part in module.named_modules():
            for name, each in part._buffers.items():
                is_statistic = isinstance(part, _NormBase)
                if not is_statistic and each is not None and name not in part._non_persistent_buffers_set:
                    yield f"{path}.{name}".lstrip("."), each


_OF_WEIGHTS = (
    "DistributedDataParallel averages the gradients of forward(inputs), not of model(inputs), and only of "
    "parameters that it was built with and that were not frozen then"
)
_OF_BUFFERS = (
    "a checkpoint holds that of rank 0, so a restart is not exact. Make it equal with "
    "torch.distributed.all_reduce(), or set forward.broadcast_buffers = True"
)
