"""Report a long wait or a long task at intervals: a silent job looks like one that hangs."""

import time
from collections.abc import Callable

from common.ground.exits import print_line

EVERY = 30.0  # seconds


class Heartbeat:
    """Logs a line at most every `every` seconds (default: EVERY), with the seconds since it was made.

    log: called with the line. Threads may share a Heartbeat; two of them may log at the same time.
    """

    def __init__(self, every: float | None = None, log: Callable[[str], None] = print_line):
        self._every, self._log = every, log
        self._begin = self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        """Return the time since the heartbeat was made."""
        return time.monotonic() - self._begin

    def beat(self, text: str) -> None:
        """Log "TEXT (N s)" if a line is due."""
        now = time.monotonic()
        if now - self._last >= (EVERY if self._every is None else self._every):
            self._last = now
            self._log(f"{text} ({now - self._begin:.0f} s)")
