"""--recheck N: compute one shard of every N-th step again, on the next process: one that is wrong is named.

A sum of the bits of the gradients of each shard travels with the losses of each step, and rank 0 writes the
sums (bootfile/records.py), so that an audit names the shard that differs. In every N-th step, in
turn over the shards, all processes get the inputs of a shard and the gradients of its outputs. The one after
the owner computes its gradients again; their sum travels as well. If it differs, all compute the shard, and
the majority says who was wrong, before the optimizer takes the step.

It takes gradients that come from one call of the model alone. Outside is, for example, a loss with a penalty
on the weights: until a first shard was equal a difference is a doubt, and the second doubt ends the
comparison. Related work: torchtitan's replayer (pull request 4333): the first step after a load twice.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from bootfile.exact.due import Due
from bootfile.exact.plugins import Parts, Plugin
from bootfile.ground import accelerator, exit_codes
from bootfile.ground.errors import BadInput
from bootfile.ground.files import explain_write
from bootfile.ground.mixing import mix
from bootfile.histories import cut_shards, write_shards
from bootfile.processes import ranks
from bootfile.records import SHARDS
from common.parallel.repeated_calls import Recorder

_BITS = 48  # of a sum: float64 holds it, and adding zeros does not round it
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes -> a type with the bits
_MOST_DOUBTS = 2
_UNKNOWN = -1.0  # a sum that was not computed again


class WrongResult(BadInput):
    """A process has computed a shard wrongly. Nothing of the step was used."""

    code = exit_codes.DIFFERS


class Recheck(Plugin):
    """Keeps the sums of the shards, and computes a shard again in some steps.

    Shards calls begin_forward(), add(), compare() and exchange() on every rank; the run calls the others.
    shards: those of the job, after attach(). every: steps. say: prints a line on rank 0.
    """

    def __init__(self, shards: Any, forward: Any, every: int, say: Callable[[str], object]):
        self._shards = shards
        self._every = every
        self._say = say
        self._recorder = Recorder(forward, forward.module, self._watch_outputs)
        self._slopes: list[torch.Tensor | None] = []  # gradients of the outputs of the recorded call
        self._is_single = True  # the recorded shard has called the model once
        self._sums: list[torch.Tensor] = []  # of this rank's shards in this step, float64 []
        self._again = _UNKNOWN  # the sum that this rank has computed again in this step
        self._sent: Any = None  # what all ranks have got of the shard: inputs, states, slopes
        self._is_proven = False  # a shard that was computed again was equal
        self._doubts = 0  # steps before it in which one was not
        self._steps: dict[int, list[int]] = {}  # step -> the sums of all shards, since the last write()

    def find_shard(self, step: int) -> int | None:
        """Return the shard of a step that is computed again, the same on every rank; None without one."""
        if self._doubts == _MOST_DOUBTS or step % self._every:
            return None
        return step // self._every % self._shards.count

    def begin_forward(self, step: int, shard: int, sources: list[Any] | None) -> None:
        """Record the coming forward pass of a shard, if it is the one, or the first of another rank, which
        needs its form. sources: generators of random numbers; None for a second pass of a shard."""
        chosen = self.find_shard(step)
        if sources is None:
            self._is_single = self._is_single and shard != chosen
        elif chosen is not None and shard in (chosen, self._shards.first):
            self._is_single = True
            self._recorder.expect(sources)

    def _watch_outputs(self, output: Any) -> None:
        """Keep the gradients of the outputs: autograd calls the hooks in the backward pass."""
        outputs = _list_outputs(output)
        slopes: list[torch.Tensor | None] = [None] * len(outputs)
        for place, tensor in enumerate(outputs):

            def keep(slope: torch.Tensor, place: int = place) -> None:
                slopes[place] = slope.detach().cpu()

            tensor.register_hook(keep)
        self._slopes = slopes

    def add(self, step: int, shard: int, gradients: Iterable[torch.Tensor], factor: int) -> None:
        """Add the sum of a shard of this rank. gradients: of all parameters that are trained, in the same
        order on every rank. factor: by which they were multiplied; 0 for a shard without samples."""
        self._sums.append(sum_bits(gradients, self._shards.device))
        is_whole = self._is_single and self._recorder.inputs and factor
        if is_whole and shard == self.find_shard(step):
            self._sent = (self._recorder.inputs, self._recorder.states, self._slopes, factor)

    def compare(self, step: int, restore_buffers: Callable[[], None]) -> None:
        """Compute the chosen shard again if it is the turn of this rank. Called on every rank after its last
        shard: the ranks wait for the owner. restore_buffers: sets them to those before the step."""
        chosen = self.find_shard(step)
        if chosen is None:
            return
        owner = self._shards.find_owner(chosen)
        self._sent = ranks.broadcast_object(self._sent, owner, is_known=ranks.rank() == owner)
        if ranks.rank() == (owner + 1) % ranks.world_size():
            self._again = self._compute(restore_buffers)

    def exchange(self, step: int, rows: torch.Tensor, restore_buffers: Callable[[], None]) -> torch.Tensor:
        """Return the losses of all shards [V] on every rank. Raises WrongResult on every rank, before the
        step is used, if the shard that was computed twice differs. rows: those of this rank's shards."""
        chosen = self.find_shard(step)
        own = rows.new_zeros(1)
        if chosen is not None and ranks.rank() == (self._shards.find_owner(chosen) + 1) % ranks.world_size():
            own += self._again
        sent = torch.cat([rows, self._shards.make_rows(self._sums), own])
        self._sums = []
        if ranks.world_size() > 1:
            with ranks.waiting():
                torch.distributed.all_reduce(sent)
        rows, rest = sent.split([len(rows), len(rows) + 1])
        *sums, again = rest.tolist()  # the host waits for the device here
        if chosen is not None and again != _UNKNOWN:
            if again == sums[chosen]:
                self._is_proven = True
            elif self._is_proven:
                self._find_wrong(step, chosen, sums[chosen], again, restore_buffers)
            else:
                self._doubt(step, chosen)
        self._sent = None
        self._recorder.forget()
        if ranks.is_first():
            self._steps[step] = [int(value) for value in sums]
        return rows

    def _doubt(self, step: int, shard: int) -> None:
        """Warn of a difference that may come from the loss, and end the comparison at the second one."""
        self._doubts += 1
        end = "; --recheck is off" if self._doubts == _MOST_DOUBTS else ""
        self._say(
            f"warning: step {step}: shard {shard} of rank {self._shards.find_owner(shard)} was computed "
            "twice, and the gradients differ: an error of the hardware, or they do not come from one call of "
            f"the model alone{end}"
        )

    def _find_wrong(self, step: int, shard: int, first: float, again: float, restore: Callable) -> None:
        """Compute a shard once more on every rank, and raise WrongResult there with the ranks that are wrong.
        first, again: the sums of its owner and of the next rank."""
        owner = self._shards.find_owner(shard)
        votes = [(owner, int(first)), ((owner + 1) % ranks.world_size(), int(again))]
        computed = ranks.gather_objects(self._compute(restore))
        votes += [(rank, int(value)) for rank, value in enumerate(computed) if value != _UNKNOWN]
        raise WrongResult(describe(step, shard, votes))

    def _compute(self, restore_buffers: Callable[[], None]) -> float:
        """Return the sum of the gradients of the shard that was sent, computed now, or _UNKNOWN."""
        if not self._sent:
            return _UNKNOWN
        inputs, states, slopes, factor = self._sent
        parameters = self._shards.list_trained()

        def find_sum(output: Any) -> float:
            """Return the sum of the bits of the gradients, by a backward pass from this output."""
            # the backward pass begins with the gradients of the outputs, which were sent as slopes
            pairs = zip(_list_outputs(output), slopes, strict=True)
            used = [(tensor, slope.to(tensor.device)) for tensor, slope in pairs if slope is not None]
            outputs, gradients_of_outputs = zip(*used, strict=True)
            gradients = torch.autograd.grad(outputs, parameters, gradients_of_outputs, allow_unused=True)
            scaled = []
            for parameter, gradient in zip(parameters, gradients, strict=True):
                scaled.append(torch.zeros_like(parameter) if gradient is None else gradient * factor)
            return float(sum_bits(scaled, self._shards.device))

        restore_buffers()
        with self._shards.repeating():
            value = self._recorder.repeat(inputs, states, find_sum)
        return _UNKNOWN if value is None else value

    def begin(self, parts: Parts, step: int) -> None:
        """Delete the steps after `step` from the file in the folder: this start computes them again."""
        self._folder = parts.saver.folder
        self._say_once = parts.say_once
        self._writes = parts.writes and ranks.is_first()
        if self._writes:
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


def sum_bits(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of the bits of the gradients of a shard, float64 [] in 0..2^48: any other bit is another
    sum, and the order of the gradients counts."""
    sums = torch.stack([_add_bits(gradient).to(device) for gradient in gradients])
    whole = (sums * _make_factors(len(sums), device)).sum()
    # the highest bits of float64 count, too
    return accelerator.double((whole ^ (whole >> 32)) & (2**_BITS - 1))


@functools.cache
def _make_factors(count: int, device: torch.device) -> torch.Tensor:
    """Return different odd numbers, int64 [count], so that the gradients of two parameters cannot be
    exchanged."""
    numbers = mix(np.arange(count, dtype=np.uint64)) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)


def _add_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements of a tensor as integers, int64 []. One other element is another sum."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.view(_INTEGERS[tensor.element_size()])
    # its sum takes a third of the time of one in int64
    kind = torch.int64 if bits.dtype == torch.int64 else torch.int32
    return bits.sum(dtype=kind).long()


def _list_outputs(output: Any) -> list[torch.Tensor]:
    """Return the tensors among the outputs of a model that have a gradient."""
    leaves, _ = tree_flatten(output)
    return [value for value in leaves if isinstance(value, torch.Tensor) and value.requires_grad]


def describe(step: int, shard: int, votes: list[tuple[int, int]]) -> str:
    """Return the sentence about a shard whose gradients differ. votes: (rank, the sum of the gradients), one
    for each time that a rank has computed the shard."""
    counted = collections.Counter(value for _, value in votes).most_common(2)
    head = f"step {step}: the gradients of shard {shard} were computed {len(votes)} times, and differ"
    common, most = counted[0]
    if len(counted) > 1 and counted[1][1] == most:
        results = []
        for rank, value in votes:
            results.append(f"rank {rank} has one" if value == common else f"rank {rank} has another")
        return (
            f"{head}; there is no majority, so it is not known which rank is wrong: {', '.join(results)}. "
            "Are the machines of one kind? The step was not used"
        )
    names = []
    for rank in sorted({rank for rank, value in votes if value != common}):
        tries = [value for voter, value in votes if voter == rank]
        bad = sum(value != common for value in tries)
        names.append(f"rank {rank} was wrong in {bad} of {len(tries)}")
    return (
        f"{head}: {', '.join(names)}. The step was not used. Look at that machine, and audit the steps "
        "before it: python -m launch audit"
    )
