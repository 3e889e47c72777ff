"""Record a sum of the gradients of each shard in each step, so that an audit names the shard that differs.

A sum is one of the bits of all gradients of the shard, before they are added to those of other shards. It
needs one pass over the gradients, and no message of its own: the sums travel with the losses of the step.
Rank 0 writes them with each report and each save (bootfile/records.py).
"""

import contextlib
from collections.abc import Iterable

import numpy as np
import torch

from bootfile.exact.due import Due
from bootfile.exact.plugins import Parts, Plugin
from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from bootfile.ground.files import explain_write
from bootfile.ground.mixing import mix
from bootfile.records import SHARDS, cut_shards, write_shards

_BITS = 48  # of a sum: float64 holds it, and adding zeros does not round it
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes -> a type with the bits


class GradientSums(Plugin):
    """Collects the sums of the shards. Shards makes one on every rank if shards are computed twice.

    device: that of the model. keeps: whether this rank writes them.
    """

    def __init__(self, device: torch.device, keeps: bool):
        self._device = device
        self._keeps = keeps
        self._factors = torch.zeros(0, dtype=torch.int64)
        self._shards: list[torch.Tensor] = []  # of this rank in this step, float64 []
        self._steps: dict[int, list[int]] = {}  # step -> the sums of all shards, since the last write()

    def add(self, gradients: Iterable[torch.Tensor]) -> None:
        """Add a shard with these gradients, in the same order in each step and on every rank."""
        # any other bit is another sum; a faulty element is not hidden by rounding
        sums = [_add_bits(gradient).to(self._device) for gradient in gradients]
        added = torch.stack(sums)
        # the gradients have different numbers, so that those of two parameters cannot be exchanged
        if len(self._factors) != len(added):
            numbers = mix(np.arange(len(added), dtype=np.uint64)) | np.uint64(1)
            self._factors = torch.from_numpy(numbers.view(np.int64)).to(self._device)
        whole = (added * self._factors).sum()
        # the highest bits of float64 count, too
        kept = (whole ^ (whole >> 32)) & (2**_BITS - 1)
        self._shards.append(accelerator.double(kept))

    def take(self) -> list[torch.Tensor]:
        """Return the sums of this rank's shards in this step, float64 [] each, and begin the next step."""
        shards = self._shards
        self._shards = []
        return shards

    def end_step(self, step: int, sums: Iterable[float]) -> None:
        """Keep the sums of all shards of a step."""
        if self._keeps:
            self._steps[step] = [int(value) for value in sums]

    def begin(self, parts: Parts, step: int) -> None:
        """Delete the steps after `step` from the file in the folder: this start computes them again."""
        self._folder = parts.saver.folder
        self._say_once = parts.say_once
        self._writes = parts.writes
        if self._keeps and self._writes:
            with contextlib.suppress(OSError, BadInput):  # a sum that is missing is not an error of the run
                cut_shards(self._folder, step)

    def ended(self, step: int, due: Due) -> None:
        if due.report or due.save:
            self.write()

    def write(self) -> None:
        """Append the steps since the last call to the file in the folder, or say why some are lost."""
        steps = self._steps
        self._steps = {}
        if not steps or not self._writes:
            return
        try:
            write_shards(self._folder, steps)
        except OSError as error:
            reason = explain_write(error, self._folder)
            self._say_once(f"warning: {SHARDS} lacks steps: {reason}", SHARDS)


def _add_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements of a tensor as integers, int64 []. One other element is another sum."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.view(_INTEGERS[tensor.element_size()])
    kind = torch.int32  # its sum takes a third of the time of one in int64
    if bits.dtype == torch.int64:
        kind = torch.int64
    return bits.sum(dtype=kind).long()
