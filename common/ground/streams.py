"""Standard output and standard error of a job: closed, full or without a reader, they do not stop it.

An error arrives also if code of the job has put another object in place of sys.stderr: torch.distributed does
so while it reports an error, and a job that ends then would take the error along.
"""

import contextlib
import io
import os
import sys
from typing import Any, TextIO

from bootfile.ground import errors

_at_start: list[TextIO] = []  # standard error of the job, as protect_output() has made it


class _Output(io.FileIO):
    """Standard output or standard error. Text that cannot be written is lost. `count`: bytes so far."""

    count = 0

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        self.count += len(data)
        try:
            return super().write(data)
        except OSError:
            return len(data)


def protect_output() -> None:
    """Ignore that standard output or error is closed or full, or has lost its reader. Call it before files
    are opened: they must not get the number of a closed stream."""
    null = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    while null < 3:  # that of a closed stream
        os.set_inheritable(null, True)
        null = os.open(os.devnull, os.O_RDWR)
    os.close(null)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # otherwise a test or a service has replaced it
            file = io.BufferedWriter(_Output(number, "w", closefd=False))
            encoding = stream.encoding if stream else "utf-8"
            protected = io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, protected)
            if number == 2:
                _at_start[:] = [protected]
                errors.error_writers.append(write_error)


def count_errors() -> int | None:
    """Return the bytes that have reached standard error so far; None if protect_output() has not made it."""
    for stream in _at_start:
        count: int = stream.buffer.raw.count  # type: ignore[attr-defined]
        return count
    return None


def write_error(text: str) -> None:
    """Write text to sys.stderr, and if it does not arrive there, to standard error as it was at the start. A
    line may come twice if another object has sent it there unseen, but it is never lost."""
    before = count_errors()
    with contextlib.suppress(Exception):  # any object may be in its place, or None
        sys.stderr.write(text)
        sys.stderr.flush()
    for stream in _at_start:
        if stream is not sys.stderr and count_errors() == before:
            with contextlib.suppress(OSError, ValueError):
                stream.write(text)
                stream.flush()
