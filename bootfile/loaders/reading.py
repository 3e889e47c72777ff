"""Name the sample that a process waits for, if its read hangs, as on a mount that does not answer."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from bootfile.ground.errors import print_line
from bootfile.processes import waits

_PATIENCE = 30.0  # seconds until the first line; each later one comes after twice the time
_POLL = 1.0  # seconds

_reads = waits.reads
_watched = set[int]()  # processes with a thread that watches: a forked one has none


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Watch this thread while it reads a sample. name: as a line shows it, a path or a number."""
    process = os.getpid()
    # a fork has the table of its parent, but not its thread
    if process not in _watched:
        _watched.add(process)
        _reads.clear()
        threading.Thread(target=_watch, name="hung reads", daemon=True).start()
    _reads[threading.get_ident()] = time.monotonic(), name
    try:
        yield
    finally:
        _reads.pop(threading.get_ident(), None)


def _watch() -> None:
    """Print a line for the read that has waited longest; a thread of each process that reads."""
    limit = _PATIENCE  # seconds until the next line
    while True:
        time.sleep(_POLL)
        # other threads write to it: the copy is taken at once
        reads = [*_reads.copy().values()]
        start, name = min(reads, default=(time.monotonic(), ""))
        waited = time.monotonic() - start
        if waited >= limit:
            print_line(f"waiting for data for {waited:.0f} s: {name}")
            limit *= 2
        elif waited < _PATIENCE:  # another read
            limit = _PATIENCE
