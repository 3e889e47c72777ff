"""When a run saves and when it reports: after some steps, seconds or epochs.

A save within a long epoch is also due by time. Only the clock of rank 0 counts: it asks before a vote, and
the vote tells every rank, so that all of them save and report after the same step.
"""

import time
from collections.abc import Collection
from typing import NamedTuple

from bootfile.ground.errors import BadInput

UNITS = ("step", "s", "epoch")
_FIRST = 120.0  # seconds of training for which a save within an epoch is worth its time
_MOST = 1800.0  # seconds of training that a killed run loses at most


class Interval(NamedTuple):
    """An interval between saves or reports. number: of the unit. unit: "step", "s" (seconds) or "epoch"."""

    number: float
    unit: str = "step"

    def steps(self, steps_per_epoch: int) -> int:
        """Return the interval in steps, at least one; 0 if it counts seconds, or is 0."""
        steps = int(self.number * {"step": 1, "epoch": steps_per_epoch, "s": 0}[self.unit])
        return max(steps, 1) if self.number > 0 and self.unit != "s" else steps

    def ends_at(self, step: int, steps_per_epoch: int) -> bool:
        """Return whether an interval that counts steps or epochs ends at this step."""
        every = self.steps(steps_per_epoch)
        return every > 0 and step % every == 0

    def has_passed(self, seconds: float) -> bool:
        """Return whether an interval that counts seconds has passed."""
        return self.unit == "s" and seconds >= self.number

    def __str__(self) -> str:
        return f"{self.number:g}{self.unit}"


class Due(NamedTuple):
    """What end_step() returns, the same on every rank. A report is also due before each save."""

    report: bool
    save: bool


def _interval(name: str, every: int | Interval) -> Interval:
    """Return the steps or the interval that the user asked for as an Interval. Raises BadInput."""
    is_known = isinstance(every, int) or (isinstance(every, Interval) and every.unit in UNITS)
    interval = every if isinstance(every, Interval) else Interval(every)
    if not is_known or interval.number < 0:
        raise BadInput(f"{name}={every}: expected a number of steps, or Interval(300, 's'), for example")
    return interval


class SaveTimes:
    """The times of the saves of one start.

    every: the steps or the interval that the user asked for. If it counts epochs, which may be long, a save
        is also due when half of the training of this start is not saved, from 2 minutes on, and after each 30
        minutes. So a job that is killed again and again progresses.
    keep_every: the distance of older checkpoints that stay, in steps; 0: none. A save is due at each.
    `saved_at`: the time of the last save, by time.monotonic(); at first that of the start.
    """

    def __init__(self, every: int | Interval, keep_every: int = 0):
        self.every = _interval("save_every", every)
        self.keep_every = keep_every
        self.begin()

    def begin(self) -> None:
        """Begin with the first step of this start."""
        self.saved_at = self._began = time.monotonic()

    def is_planned(self, step: int, steps_per_epoch: int) -> bool:
        """Return whether a save is due after a step, whatever the clock says."""
        is_kept = self.keep_every > 0 and step % self.keep_every == 0
        return is_kept or self.every.ends_at(step, steps_per_epoch)

    def is_late(self) -> bool:
        """Return whether a save by time is due. Called on rank 0 before each vote: only its clock counts."""
        now = time.monotonic()
        unsaved = now - self.saved_at
        if self.every.unit != "epoch":
            return self.every.has_passed(unsaved)
        # less often as a start grows older: at most half of what it has trained can be lost
        half = (now - self._began) / 2
        return unsaved >= max(_FIRST, min(half, _MOST))


class ReportTimes:
    """The times of the reports of one start.

    every: the steps or the interval that the user asked for; None: no report but those that others ask for.
    only_after: the only steps after which a report is due, in place of `every`; None: `every` counts.
    evaluate_every: the steps between two evaluations within an epoch; 0: none.
    `first`: the first step of this start. `reported_at`: the time of the last report, by time.monotonic(); at
    first that of the start. `is_late`: all ranks have agreed that a report by time is due.
    """

    def __init__(
        self, every: int | Interval | None, only_after: Collection[int | None] | None, evaluate_every: int
    ):
        self._every = None if every is None else _interval("report_every", every)
        self._only_after = only_after
        self._evaluate_every = evaluate_every
        self.first = 0
        self.is_late = False
        self._has_asked = False  # rank 0 has asked for it; the others may learn it one step later
        self.reported_at = time.monotonic()

    def ask(self) -> bool:
        """Ask for a report by time if one is due, once for each report. Called on rank 0 before each vote."""
        if self._every is None or self._has_asked:
            return False
        # the vote of this step may be read one step later: until then it is not asked again
        self._has_asked = self._every.has_passed(time.monotonic() - self.reported_at)
        return self._has_asked

    def is_due(self, step: int, steps_per_epoch: int) -> bool:
        """Return whether a report is due after a step, the same on every rank: by `every`, after each epoch,
        before each evaluation, and after the first step if `every` counts seconds."""
        if self._only_after is not None:
            return step in self._only_after
        if self._evaluate_every and step % self._evaluate_every == 0:
            return True
        if self._every is None:
            return False
        is_timed = self._every.unit == "s" and (self.is_late or step == self.first)
        return is_timed or self._every.ends_at(step, steps_per_epoch) or step % steps_per_epoch == 0

    def end(self) -> None:
        """Note that a report ends with this step: the next one is counted from here."""
        self.is_late = False
        self._has_asked = False
        self.reported_at = time.monotonic()
