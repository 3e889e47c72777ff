"""Restore the state that a run continues from: what all ranks do before the first step of a start."""

import math
from collections.abc import Callable
from typing import Any

import torch

from bootfile.exact.choose import choose
from bootfile.exact.events import Events
from bootfile.exact.machines import Machines
from bootfile.exact.protocols import TrainingLoader
from bootfile.exact.saver import Saver
from bootfile.exact.state import RunState, SavedState
from bootfile.ground.errors import BadInput
from bootfile.ground.folder_lock import FolderLock
from bootfile.ground.results import refuse_links
from bootfile.processes import ranks


class Start:
    """The start of a run from its newest checkpoint, or from its first step. An Exact has one.

    loader, state, saver, machines, events, say: those of the Exact.
    lock: of the folder of a loop of one's own; None: a job holds the folder of its output itself.
    writes: False for a run that saves nothing.
    """

    def __init__(
        self,
        loader: TrainingLoader,
        state: RunState,
        saver: Saver,
        machines: Machines,
        events: Events,
        lock: FolderLock | None,
        writes: bool,
        say: Callable[[str], object],
    ):
        self._loader = loader
        self._state = state
        self._saver = saver
        self._machines = machines
        self._events = events
        self._lock = lock
        self._writes = writes
        self._say = say

    def restore(self, most_steps: int, has_shards: bool) -> int:
        """Restore the state to continue from, on every rank, and return its step; 0 for a new run.

        most_steps: of the whole run, or a number that no run reaches. has_shards: whether the model computes
        in exact shards. Rank 0 reads the checkpoint; the others wait for it. Raises BadInput on every rank.
        """
        state = None
        error = None
        if ranks.is_first():
            try:
                state = self._choose(most_steps)
            except BadInput as refused:
                error = refused  # the other ranks wait below: each has to learn of it
        self._events.wait_for_first(error)
        # the ranks other than 0 wait here until it has read and checked a checkpoint
        state = self._state.broadcast(state)
        # rank 0 has loaded a state that is not sharded while it chose the checkpoint
        if state and (self._state.is_sharded or not ranks.is_first()):
            self._state.restore(state)
        step = state["step"] if state else 0
        self._machines.settle(step, state.get("machines", []) if state else [], has_shards)
        return step

    def warn_of_generators(self, model: torch.nn.Module, criterion: Any) -> None:
        """Print one warning that names generators which neither a checkpoint nor the loader knows."""
        parts = {"model": model, "criterion": criterion, "collate_fn": self._loader.collate_fn}
        if paths := self._loader.find_unknown_generators(parts, self._state.objects):
            self._say(
                f"warning: {', '.join(paths)}: random number generators of your own, whose numbers a restart "
                "does not repeat. Use torch's global one, or call checkpoint.add(name=generator) before "
                "resume(). One of a collate_fn repeats its numbers, but only at the same number of processes"
            )

    def _choose(self, most_steps: int) -> SavedState | None:
        """Return the state to continue from on rank 0, or None. The state is loaded, unless it is sharded.
        Raises BadInput."""
        # before anything is read: two runs in one folder would write each other's checkpoints
        if self._lock:
            self._lock.hold()
        # before the training, not at the first save: an object may have a type that no checkpoint can hold
        if self._writes:
            self._state.check_saveable()
            refuse_links(self._saver.folder)
        wanted = self._events.choose_checkpoint()
        if wanted == "never":
            return None

        # called for the newest checkpoint, and for older ones as long as one is refused
        def load(state: SavedState) -> None:
            is_other = self._machines.compare_starts(state)
            self._state.is_other_machine = is_other
            self._loader.receipt.expects_same = not is_other
            self._state.load(state, most_steps)

        is_whole = not self._state.is_sharded  # otherwise each rank reads its part
        # raises BadInput if there are checkpoints and none can be used: a new run would overwrite them
        path, state = choose(wanted, self._saver.checkpoints, load, is_whole)
        if state is None:
            self._say_what_was_lost()
            return None
        if wanted == "auto":
            self._state.run = state["run"]
        total_steps = self._loader.total_steps
        end = f" of {total_steps}" if total_steps else ""
        epoch = max(1, math.ceil(state["step"] / len(self._loader)))
        self._say(f"resumed from {path}: epoch {epoch}, step {state['step']}{end}")
        if change := self._state.schedule.change:
            self._say(f"the schedule of the checkpoint is another one: {change}")
        for note in self._state.take_notes():
            self._say(note)
        return state

    def _say_what_was_lost(self) -> None:
        """Say that the start before this one was killed before its first save, if it was. Called on rank 0
        before the first step: the receipt has the steps of that start still."""
        step = self._loader.receipt.find_last_step(self._saver.folder) if self._writes else 0
        was_killed = self._lock is not None and self._lock.was_left
        if step or was_killed:
            after = f" after step {step}" if step else ""
            self._say(
                f"warning: the start before this one ended{after} without a save: this one begins again at "
                "step 1. A save every 5 minutes: --save_every 300s, in a loop of your own "
                "save_every=Interval(300, 's')"
            )
