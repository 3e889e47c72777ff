"""Name the sample that a process waits for, if its read hangs, as on a mount that does not answer."""

import os
import threading
import time

from common.ground.exits import print_line

_PATIENCE, _POLL = (
    30.0,
    1.0,
)  # seconds until the first line, each later one after twice the time; of the thread

_reads: dict[int, tuple[float, str]] = {}  # thread -> start, name of the sample
_watched = False


class reading:
    """A context in which this thread reads a sample. name: as a line shows it, a path or a number."""

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        global _watched
        if not _watched:
            _watched = True
            threading.Thread(target=_watch, name="hung reads", daemon=True).start()
        _reads[threading.get_ident()] = time.monotonic(), self._name

    def __exit__(self, *_: object) -> None:
        _reads.pop(threading.get_ident(), None)


def _watch() -> None:
    limit = _PATIENCE
    while True:
        time.sleep(_POLL)
        now = time.monotonic()
        start, name = min([*_reads.copy().values()], default=(now, ""))
        if now - start < _PATIENCE:
            limit = _PATIENCE
        elif now - start >= limit:
            print_line(f"waiting for data for {now - start:.0f} s: {name}")
            limit *= 2


def _after_fork() -> None:
    global _watched
    _watched = False  # the child has no thread
    _reads.clear()


os.register_at_fork(after_in_child=_after_fork)
