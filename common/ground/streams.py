"""Standard output and standard error of a job: closed, full or without a reader, they do not stop it."""

import io
import os
import sys
from typing import Any


class _Output(io.FileIO):
    """Standard output or standard error. Text that cannot be written is lost."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
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
            setattr(sys, name, io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True))
