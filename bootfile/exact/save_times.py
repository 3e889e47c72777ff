"""When a run saves: after some steps, seconds or epochs, and within a long epoch also by time."""

import time

from bootfile.ground.intervals import Interval

_FIRST = 120.0  # seconds of training for which a save within an epoch is worth its time
_MOST = 1800.0  # seconds of training that a killed run loses at most


class SaveTimes:
    """The times of the saves of one start.

    every: the interval that the user asked for. If it counts epochs, which may be long, a save is also due
        when half of the training of this start is not saved, from 2 minutes on, and after each 30 minutes. So
        a job that is killed again and again progresses.
    `saved_at`: the time of the last save, by time.monotonic(); at first that of the start.
    """

    def __init__(self, every: Interval):
        self.every = every
        self.saved_at = time.monotonic()
        self._began = self.saved_at

    def begin(self) -> None:
        """Begin with the first step of this start."""
        self._began = time.monotonic()
        self.saved_at = self._began

    def is_late(self) -> bool:
        """Return whether a save by time is due. Called on rank 0 before each vote: only its clock counts."""
        now = time.monotonic()
        unsaved = now - self.saved_at
        if self.every.unit != "epoch":
            return self.every.has_passed(unsaved)
        half = (now - self._began) / 2
        return unsaved >= max(_FIRST, min(half, _MOST))
