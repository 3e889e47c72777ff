"""Compute one shard of a step a second time, on the next process: one that computes wrongly is named.

Every few steps, in turn over the shards, the process of a shard sends the inputs of its forward pass and the
gradients of the outputs to the next process. That computes the gradients of the shard again, from the same
weights, and compares their digests. If they differ, all processes compute the shard again before the
optimizer takes the step, and the majority says who was wrong. One process alone compares with itself.

A shard is comparable if its gradients come from one call of the model alone: that of a loss which also uses
the weights, for example, is not. Each process finds that out with its own first shard, which it computes
twice itself. If two such shards differ, nothing is compared any more.

Related work: torchtitan's replayer (pull request 4333), which computes the first step after a load twice.
"""

import collections
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten

from bootfile.ground.errors import BadInput
from bootfile.processes import ranks
from common.parallel.shard_guards import FirstCall, is_dense

_MOST_DOUBTS = 2
WRONG = 20  # exit code, as of an audit that found a difference
_Digests = dict[str, int]  # name of a parameter -> digest of its gradient


class WrongResult(BadInput):
    """A process has computed a shard wrongly. Nothing of the step was used."""

    code = WRONG


class _Shard(NamedTuple):
    """A shard as one process sends it to another.

    inputs, states: of FirstCall. slopes: the gradients of the outputs, None for those without. digests: of
    the gradients of the parameters.
    """

    inputs: list[Any]
    states: list[Any]
    slopes: list[torch.Tensor | None]
    digests: _Digests


class Recheck:
    """Computes a shard again every few steps. Shards makes one on every rank, and calls its methods there.

        begin()       before the first forward pass of a shard
        note_more()   before each further one: the shard is not comparable
        end()         after the backward pass of the shard
        compare()     after the last shard of this rank: the next rank waits for the rank of the shard
        judge()       on all ranks, if the sum of their flags says so

    forward: the DistributedDataParallel. every: steps. owner_of: returns the rank of a shard. count: of the
    shards of a step. device: that of the model.
    """

    def __init__(
        self, forward: Any, every: int, owner_of: Callable[[int], int], count: int, device: torch.device
    ):
        self._model = forward.module
        self._every = every
        self._owner_of = owner_of
        self._count = count
        self._device = device
        self._rank = ranks.rank()
        self._next = (self._rank + 1) % ranks.world_size()
        self._call = FirstCall("the model", forward, forward.module)
        forward.register_forward_hook(self._watch_outputs)
        self._slopes: list[torch.Tensor | None] = []  # gradients of the outputs of the recorded call
        self._is_open = False  # from begin() to end(), in a shard that is recorded
        self._is_single = True  # the recorded shard has called the model once
        self._mine: _Shard | None = None  # this rank's shard of this step
        self._theirs: _Shard | None = None  # that of the rank before, which this one has computed again
        self._answer: _Digests = {}  # what this rank has computed for it
        self._is_known = False  # this rank has found out whether its shards are comparable
        self._doubts = 0  # steps in which a rank has found another result itself
        self._is_on = True

    def find_shard(self, step: int) -> int | None:
        """Return the shard of a step that is computed twice, the same on every rank; None without one."""
        if not self._is_on or step % self._every:
            return None
        return step // self._every % self._count

    def begin(self, step: int, shard: int, is_first: bool, sources: list[Any]) -> None:
        """Record the coming forward pass if this shard is the one. is_first: of this rank in this step.
        sources: generators of random numbers.

        The rank that computes a shard again records its own first call as well: it needs the types of inputs.
        """
        chosen = self.find_shard(step)
        if chosen is None:
            return
        owner = self._owner_of(chosen)
        if is_first:
            self._mine = None
            self._theirs = None
        if shard == chosen or (is_first and owner != self._rank):
            self._call.forget()
            self._call.expect(sources)
            self._is_open = True
            self._is_single = True
            self._slopes = []

    def note_more(self) -> None:
        """Note a second forward pass of a shard: its gradients are the sum of two calls."""
        self._is_single = False

    def _watch_outputs(self, _: Any, args: tuple[Any, ...], output: Any) -> None:
        """Keep the gradients of the outputs. torch calls it after each forward pass, and autograd calls the
        hooks below in the backward pass."""
        if not self._is_open or self._slopes:
            return
        outputs = _list_outputs(output)
        self._slopes = [None] * len(outputs)
        for place, tensor in enumerate(outputs):

            def keep(slope: torch.Tensor, place: int = place) -> None:
                self._slopes[place] = slope.detach().clone()

            tensor.register_hook(keep)

    def end(self, step: int, shard: int) -> None:
        """Keep the digests of the gradients of this shard, if it is the one, before they are added."""
        if not self._is_open:
            return
        self._is_open = False
        if shard != self.find_shard(step):
            return
        digests = {}
        for name, parameter in self._list_parameters():
            if parameter.grad is not None and is_dense(parameter.grad):
                digests[name] = int(ranks.digest(parameter.grad))
        is_comparable = self._is_single and bool(self._call.inputs) and bool(digests)
        if is_comparable:
            self._mine = _Shard(self._call.inputs, self._call.states, self._slopes, digests)
        else:
            self._mine = _Shard([], [], [], {})

    def compare(self, step: int, restore_buffers: Callable[[], None]) -> list[float]:
        """Compute the shard of the rank before again, if it is its turn, and return this rank's flags.

        They say whether a shard differs, and whether it may not be comparable; the ranks add them up.

        Called on every rank after its last shard. The rank of the shard sends it, and the next one waits for
        it, which has its own shards behind it. restore_buffers: sets them to those before the step.
        """
        chosen = self.find_shard(step)
        if chosen is None:
            return [0.0, 0.0]
        owner = self._owner_of(chosen)
        flags = [0.0, 0.0]
        if owner == self._rank:
            assert self._mine is not None
            if not self._is_known:
                # before another rank judges this one: once, by itself
                self._is_known = self._compute(self._mine, restore_buffers) == self._mine.digests
                flags[1] = float(not self._is_known)
            if self._next != self._rank:
                self._send(self._mine)
                return flags
            self._theirs = self._mine
        elif (owner + 1) % ranks.world_size() == self._rank:
            self._theirs = self._receive(owner)
        if self._theirs:
            self._answer = self._compute(self._theirs, restore_buffers)
            is_other = self._answer != self._theirs.digests
            flags[0] = float(bool(self._answer) and is_other)  # it may have no answer: no memory, for example
        return flags

    def judge(self, step: int, flags: list[float], restore_buffers: Callable[[], None], say: Any) -> None:
        """Raise WrongResult on every rank with the ranks that have computed wrongly, if the flags say that a
        shard differs. Called on every rank, with the sum of all flags, before the step is used."""
        chosen = self.find_shard(step)
        assert chosen is not None
        owner = self._owner_of(chosen)
        if flags[1]:
            # a fault is not repeated, and a loss that uses the weights, for example, is
            self._doubts += 1
            self._is_on = self._doubts < _MOST_DOUBTS
            end = "" if self._is_on else "; --recheck is off"
            say(
                f"warning: step {step}: rank {owner} has computed shard {chosen} twice, and the gradients "
                f"differ: an error of its hardware, or they do not come from one call of the model alone{end}"
            )
            return
        if not flags[0]:
            return
        # all ranks wait for the rank of the shard, and then compute it once more
        sent = self._mine._asdict() if self._mine and self._rank == owner else None
        received = ranks.gather_objects(sent)[owner]
        assert received is not None
        shard = _Shard(**received)
        votes = [(self._rank, self._compute(shard, restore_buffers))]
        if self._rank == owner:
            votes.append((owner, shard.digests))
        if self._theirs:
            votes.append((self._rank, self._answer))
        gathered: list[tuple[int, _Digests]] = []
        for votes_of_rank in ranks.gather_objects(votes):
            gathered += [(rank, digests) for rank, digests in votes_of_rank if digests]
        raise WrongResult(describe(step, chosen, gathered))

    def _list_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the names and parameters of the model that are trained."""
        named = self._model.named_parameters()
        return [(name, parameter) for name, parameter in named if parameter.requires_grad]

    def _compute(self, shard: _Shard, restore_buffers: Callable[[], None]) -> _Digests:
        """Return the digests of the gradients of a shard, computed now; {} if it cannot be repeated here."""
        if not shard.digests:
            return {}
        restore_buffers()
        parameters = self._list_parameters()

        def run_backward(output: Any) -> _Digests:
            outputs = []
            slopes = []
            for tensor, slope in zip(_list_outputs(output), shard.slopes, strict=True):
                if slope is not None:
                    outputs.append(tensor)
                    slopes.append(slope.to(tensor.device))
            gradients = torch.autograd.grad(
                outputs, [parameter for _, parameter in parameters], slopes, allow_unused=True
            )
            digests = {}
            for (name, _), gradient in zip(parameters, gradients, strict=True):
                if gradient is not None and is_dense(gradient):
                    digests[name] = int(ranks.digest(gradient))
            return digests

        with torch.enable_grad():
            return self._call.call(shard.inputs, shard.states, run_backward) or {}

    def _send(self, shard: _Shard) -> None:
        """Send a shard to the next rank, which waits for it."""
        file = io.BytesIO()
        slopes = [None if slope is None else slope.cpu() for slope in shard.slopes]
        torch.save(shard._replace(slopes=slopes)._asdict(), file)
        content = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(self._device)
        size = torch.tensor([len(content)], device=self._device)
        with ranks.waiting():
            torch.distributed.send(size, self._next)
            torch.distributed.send(content, self._next)

    def _receive(self, owner: int) -> _Shard:
        """Return the shard of another rank."""
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        with ranks.waiting():
            torch.distributed.recv(size, owner)
            content = torch.empty(int(size), dtype=torch.uint8, device=self._device)
            torch.distributed.recv(content, owner)
        return _Shard(**torch.load(io.BytesIO(content.cpu().numpy().tobytes()), weights_only=True))


def _list_outputs(output: Any) -> list[torch.Tensor]:
    """Return the tensors among the outputs of a model that have a gradient."""
    leaves, _ = tree_flatten(output)
    return [value for value in leaves if isinstance(value, torch.Tensor) and value.requires_grad]


def describe(step: int, shard: int, votes: list[tuple[int, _Digests]]) -> str:
    """Return the sentence about a shard whose gradients differ. votes: (rank, what it has computed), one for
    each time that a rank has computed the shard."""
    texts = [(rank, repr(sorted(digests.items()))) for rank, digests in votes]
    counted = collections.Counter(text for _, text in texts).most_common(2)
    head = f"step {step}: the gradients of shard {shard} were computed {len(votes)} times, and differ"
    if len(counted) > 1 and counted[0][1] == counted[1][1]:
        return (
            f"{head}; there is no majority, so it is not known which rank is wrong: "
            f"{_list_votes(texts, counted[0][0])}. Are the machines of one kind? The step was not used"
        )
    common = counted[0][0]
    right = next(digests for _, digests in votes if repr(sorted(digests.items())) == common)
    wrong: dict[int, str] = {}  # rank -> the first parameter that differs
    for rank, digests in votes:
        for name in right.keys() | digests.keys():
            if right.get(name) != digests.get(name):
                wrong.setdefault(rank, name)
    names = []
    for rank, name in sorted(wrong.items()):
        tries = [text for voter, text in texts if voter == rank]
        bad = sum(text != common for text in tries)
        names.append(f"rank {rank} was wrong in {bad} of {len(tries)} ({name})")
    return (
        f"{head}: {', '.join(names)}. The step was not used. Look at that machine, and audit the steps "
        "before it: python -m launch audit"
    )


def _list_votes(texts: list[tuple[int, str]], common: str) -> str:
    """Return which ranks have computed the one result, and which another one."""
    parts = []
    for rank, text in texts:
        parts.append(f"rank {rank} has {'one' if text == common else 'another'}")
    return ", ".join(parts)
