"""The state of a job in the memory of its processes, from which others continue when members change."""

import time
from typing import Any, NamedTuple

import numpy as np
import torch

from bootfile import __version__
from bootfile.exact import restore
from bootfile.exact.due import Due
from bootfile.exact.plugins import Parts, Processes
from bootfile.machine import facts
from bootfile.machine.differences import INSTRUCTIONS
from bootfile.processes import ranks
from common.ground.endings import Changed


class _Finished(NamedTuple):
    """What the members of a job keep after a step."""

    step: int
    due: Due  # what the step had still to do
    counts: dict[str, Any]  # RunState.counts
    receipt: dict[str, Any]  # its state
    shared: list[torch.Tensor]  # the sums of steps that the receipt does not cover
    running: torch.Tensor | None  # Exact's sums of the metrics since the last report
    rate: Any  # of Exact
    at: float  # time.time()


class Memory(Processes):
    """The processes of a job that may leave and come. Each generation has a new object. bootfile/exact calls
    the methods on every rank, in the thread of the loop, as the class Processes says. members: the Members of
    this process."""

    may_change = True

    def __init__(self, members: Any):
        self._members = members
        self._finished: _Finished | None = None  # the last step that has ended
        self.pauses = 0.0  # seconds that changes of members have cost
        self.began = time.time()  # of the first step

    @property
    def was_begun(self) -> bool:
        """Return whether this process has trained before, or got the state of one that has."""
        return self._members.was_begun

    def restore(self, parts: Parts) -> int | None:
        """Return the step of the members' state after restoring it; None: no member has one. In a process
        that is alone main() ends here: it runs again when the process is a member."""
        # the roll refuses a process with other values: its numbers would differ from those of the members
        versions = {"torch": torch.__version__, "numpy": np.__version__, "bootfile": __version__}
        machine = facts.describe()
        for name in INSTRUCTIONS:
            versions[name] = str(machine[name])
        options = {f"--{name}": value for name, value in parts.state.schedule.settings.items()}
        # main() ends here in a process that is alone, and runs again when the process is a member
        self._members.arrive(options | parts.state.identity | parts.state.sampling | versions)
        living = self._members.share()
        if living is None:
            return None
        self._continue(parts, living)
        self.has_restored = True
        return living["step"]

    def _continue(self, parts: Parts, living: dict[str, Any]) -> None:
        """Continue from the state of a member: restore() calls it on every rank."""
        restore.load(parts.state, living, parts.most_steps)  # type: ignore[arg-type]  # keys of a SavedState
        parts.state.run = living["run"]
        parts.keep_machines(living["machines"])
        finished = _Finished(*living["finished"])
        at = time.time()
        self.due = Due(*finished.due)
        # another change may come before the next step: it costs the time from here on
        self._finished = finished._replace(due=self.due, at=at)
        parts.loader.receipt.shared = list(finished.shared)
        if parts.position.running is not None and finished.running is not None:
            parts.position.running.copy_(finished.running)
        parts.position.rate = finished.rate
        # durations: the monotonic clock of another node has another zero
        since_save, since_report, self.pauses, self.began = living["times"]
        now = time.monotonic()
        parts.saves.saved_at = now - since_save
        parts.reports.reported_at = now - since_report
        self.pauses += at - finished.at

    def begin(self, parts: Parts, step: int) -> None:
        self._parts = parts
        if self._finished is None:  # no member has finished a step
            parts.loader.receipt.shared = []
            self.ended(step, Due(False, False))
        self._members.begin(self._keep)

    def announce(self, step: int) -> None:
        self._members.say(step, self._parts.say)

    def numbers(self) -> list[float]:
        """Return whether this rank knows of processes that come or leave."""
        is_due = self._members.due
        with ranks.waiting():
            self._parts.loader.share()
        return [float(is_due)]

    def judge(self, maxima: list[float]) -> None:
        self.is_changing = self.is_changing or maxima[0] > 0

    def ended(self, step: int, due: Due) -> None:
        """Keep what a member that comes later needs in addition to the objects. Their values do not change
        until all members have sent their parts of the next step."""
        parts = self._parts
        running = parts.position.running
        if running is not None:  # a copy: the next step adds to it before all members have finished
            running = running.clone()
        receipt = parts.loader.receipt
        self._finished = _Finished(
            step,
            due,
            parts.state.counts(),
            receipt.state_dict(),
            [*(receipt.shared or [])],
            running,
            parts.position.rate,
            time.time(),
        )
        # the step is kept now; a run that stops saves it with the members that it has
        if self.is_changing and not self._parts.position.is_stopping:
            raise Changed

    def check(self) -> None:
        self._members.check()

    def signal_store(self) -> None:
        return None  # the agents tell each process

    def figures(self) -> dict[str, float]:
        """Return the figures of a report. The Log asks for them."""
        plan = self._members.plan
        return {
            "generations": plan.generation + 1,
            "lost_processes": plan.lost,
            "lost_seconds": round(self.pauses, 3),
            "useful_share": round(1 - self.pauses / (time.time() - self.began), 4),
        }

    def _keep(self) -> dict[str, Any]:
        """Return the state after the last finished step. What the present one has changed is undone.
        Members.leave_group() calls it when Changed has ended main()."""
        parts = self._parts
        finished = self._finished
        now = time.monotonic()
        assert finished is not None
        # a lost member may have ended main() in the middle of a step
        parts.undo_step(finished.step)
        parts.close(Changed())  # a new generation has new ones
        state: dict[str, Any] = {**parts.state.capture(finished.step), **finished.counts}
        state["objects"]["receipt"] = finished.receipt
        # plain types, which another rank can read
        state["finished"] = tuple(finished._replace(due=tuple(finished.due)))  # type: ignore[arg-type]
        state["times"] = (
            now - parts.saves.saved_at,
            now - parts.reports.reported_at,
            self.pauses,
            self.began,
        )
        return state
