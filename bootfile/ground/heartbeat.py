"""Report a long wait or a long task at intervals: a silent job looks like one that hangs."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator

from bootfile.ground.errors import print_line

EVERY = 30.0  # seconds


class Heartbeat:
    """Prints a line at most every 30 seconds (or `every`), with the seconds since it was made. Threads may
    share it; two of them may print at the same time."""

    def __init__(self, every: float | None = None) -> None:
        self._begin = time.monotonic()
        self._last = self._begin  # the time of the last line
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


def watched(folder: str) -> contextlib.AbstractContextManager[None]:
    """Print one line if the block, which writes to a folder, takes more than 30 seconds: a mount may hang."""
    line = f"warning: {folder} has not answered for {EVERY:.0f} s: its mount may hang; the job waits for it"
    return alarm(EVERY, functools.partial(print_line, line))


@contextlib.contextmanager
def alarm(seconds: float, function: Callable[[], object]) -> Iterator[None]:
    """Call a function, in a thread, if the block takes longer than `seconds`. Without room for the thread the
    block runs all the same."""
    # in a thread, because the block itself may hang in a call of the system
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
