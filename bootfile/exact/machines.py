"""Keep the bits of a run when it is started again: its threads, and the instruction sets that it has used."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bootfile.ground.errors import BadInput
from bootfile.machine import convolution, differences, facts, threads
from bootfile.machine.differences import THREADS, in_words
from bootfile.machine.levels import OPTION, level_in_use
from bootfile.processes import ranks


def protect() -> None:
    """Replace operators whose bits depend on more than the instructions, before the first forward pass."""
    convolution.protect()
    if level_in_use():
        from bootfile.machine import vector_math  # only a run with a level needs it

        vector_math.protect()


class Machines:
    """The machines that have computed a run, the present one last.
    same_instructions: whether another instruction set than that of the checkpoint is refused, on a CPU.
    wanted_threads: threads of each process, if the user names a number: it counts from then on.
    device: of the model. say: prints a line on rank 0.
    `history`: the facts of each machine (bootfile/machine/facts.py) and its first step ("step"), as in each
        checkpoint and digest.
    """

    def __init__(
        self,
        same_instructions: bool,
        wanted_threads: int | None,
        device: torch.device,
        say: Callable[[str], object],
    ):
        self._is_on_cpu = device.type == "cpu"
        self.same_instructions = same_instructions and self._is_on_cpu
        self._wanted_threads = wanted_threads
        self.say = say
        self.history: list[dict[str, Any]] = []

    def settle(self, step: int, saved: Sequence[dict[str, Any]], is_fixed: bool) -> None:
        """Compute with the threads of the run from here on, and add this machine to the history, on every
        rank before the first step.
        step, saved: of the checkpoint, 0 without one; its history. is_fixed: the threads are set already, as
            with exact shards.
        Raises BadInput, on every rank, if the ranks have other instruction sets and they have to be the same.
        """
        self.history = [dict(machine) for machine in saved]
        before = self.history[-1] if self.history else {}
        if self._is_on_cpu and not is_fixed:
            self._set_threads(before.get(THREADS))
        now = facts.describe()
        self._compare_ranks(now)  # a collective, also without a checkpoint
        # the history of a run has one machine for each start: that of rank 0
        now = ranks.broadcast_object(now)
        known = [differences.without_step(machine) for machine in self.history]
        if now not in known:
            self.history.append({"step": step + 1, **now})
        elif known[-1] != now:  # an earlier machine of the run: it becomes the last one
            self.history.append(self.history.pop(known.index(now)))

    def _set_threads(self, saved: int | None) -> None:
        """Set the threads of this process: those that the user names, those of the run, or a first number."""
        # all ranks gather: the cores of a node are divided by the processes that it has
        place = threads.find_place()
        usual = threads.choose(ranks.gather_objects(list(place)))  # what a new run on this node would have
        # the user first, then the run: a restart on more cores keeps the bits
        number = self._wanted_threads or saved or usual
        if saved and not self._wanted_threads and usual != saved:
            source = place.source or "the cores of this node"
            self.say(
                f"{in_words(THREADS, saved)} in each process, as this run began: {source} would give "
                f"{usual}, and other bits (--threads {usual} changes it)"
            )
        threads.check_room(number)
        torch.set_num_threads(number)

    def _compare_ranks(self, now: differences.Facts) -> None:
        """Compare the machines of all ranks. Raises BadInput on every rank, or prints a warning."""
        machines = ranks.gather_objects(now)
        # each rank finds the same difference, so all of them raise or only warn
        for rank, other in enumerate(machines):
            difference = differences.other_instructions(machines[0], other)
            if difference is None:
                continue
            name, first, there = difference
            line = f"rank 0 computes with {in_words(name, first)}, rank {rank} with {in_words(name, there)}"
            if self.same_instructions:
                raise BadInput(f"{line}: the bits would depend on who computes what. {REMEDY}")
            self.say(f"warning: {line}: another order of the nodes gives other bits. {REMEDY}")
            return


REMEDY = f"A run that moves between kinds of CPUs begins with {OPTION} avx2 or any (guides/exact.md)"
