"""Standard output and standard error of a job: closed, full or without a reader, they do not stop it."""

import io
import os
import sys
from typing import Any


class _Output(io.FileIO):
    """Standard output or standard error. Text that cannot be written is lost."""

    has_reader = True  # False after a write to a pipe whose reader has ended

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            self.has_reader = not isinstance(error, BrokenPipeError)
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
            setattr(sys, name, io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True))


def has_reader() -> bool:
    """Return False if the reader of standard output has ended before the last write, as in `... | head`."""
    return getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "has_reader", True)
