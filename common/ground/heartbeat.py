"""Report a long wait or a long task at intervals: a silent job looks like one that hangs."""

import time

from common.ground.exits import print_line

EVERY = 30.0  # seconds


class Heartbeat:
    """Prints a line at most every 30 seconds (or `every`), with the seconds since it was made. Threads may
    share it; two of them may print at the same time."""

    def __init__(self, every: float | None = None) -> None:
        self._begin = self._last = time.monotonic()
        self.every = EVERY if every is None else every

    @property
    def seconds(self) -> float:
        """Return the time since the heartbeat was made."""
        return time.monotonic() - self._begin

    def beat(self, text: str) -> None:
        """Print "TEXT (N s)" if a line is due."""
        now = time.monotonic()
        if now - self._last >= self.every:
            self._last = now
            print_line(f"{text} ({now - self._begin:.0f} s)")
