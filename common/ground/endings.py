"""The end of a job: what it does then, in which order, and one clear line for an error.

Standard output and standard error may be closed, full or without a reader: they do not stop a job. An error
arrives also if code of the job has put another object in place of sys.stderr: torch.distributed does so while
it reports an error, and a job that ends then would take the error along.

Exit codes, in addition to those of bootfile/ground/errors.py:

4        the processes did not connect to each other
5        the connection to another process was lost
"""

import contextlib
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from bootfile.ground import errors
from bootfile.ground.errors import LOST_CONTACT as LOST_CONTACT
from bootfile.ground.errors import NO_RENDEZVOUS as NO_RENDEZVOUS
from bootfile.ground.errors import BadInput
from bootfile.ground.secrets import mask, mask_values

STARTED = time.monotonic()  # a job imports this module before torch

# What a job does at its end, in this order.
PLACES = ("results", "upload", "folder", "loaders", "processes", "device")
_sources: list[Any] = []  # see explain_with() and explained_by()
_at_start: list[TextIO] = []  # standard error of the job, as protect_output() has made it
_ONE_VALUE = "Expected more than 1 value per channel when training"  # torch's BatchNorm
_at_end: dict[str, list[Callable[[BaseException | None], object]]] = {place: [] for place in PLACES}


class Changed(BaseException):
    """The processes of an elastic job change: main() ends, and runs again in this process
    (common/elastic/members.py). Not an Exception, which a job may catch."""


class NoRendezvous(BadInput):
    """The processes of a job did not connect to each other in time."""

    code = NO_RENDEZVOUS


def explain(error: Exception) -> str:
    """Return one line for an error that a job's data or options cause deep inside torch, or a limit of
    processes and threads; "" for others."""
    if _ONE_VALUE in str(error):
        return f"{error}: BatchNorm needs at least 2 samples in each process: raise --batch_size"
    for source in reversed(_sources):
        if line := source.explain(error):
            return line
    from bootfile.machine import process_limits  # only after an error

    return process_limits.explain(error)


def explain_with(source: Any) -> None:
    """Ask an object for a line about the error that ends main(): the loader of the training, whose
    explain(error) returns the line or ""."""
    _sources[:] = [source]


@contextlib.contextmanager
def explained_by(source: Any) -> Iterator[None]:
    """Ask another object first about an error of this block. An object without explain() is not asked."""
    sources = [source] if hasattr(source, "explain") else []
    _sources.extend(sources)
    yield
    for each in sources:  # not after an error, which ends main()
        _sources.remove(each)


def at_end(place: str, function: Callable[[BaseException | None], object]) -> None:
    """Register function(error) for the end of main(): `error` is the exception that ended it, or None.

    place: one of PLACES, whose order is kept. At one place the function that was registered last is called
    first. A function may end the process.
    """
    _at_end[place].append(function)


def at_success(place: str, function: Callable[[], object]) -> None:
    """Register function() as at_end() does, for a main() that ends without an exception."""
    at_end(place, lambda error: None if error else function())


def end(error: BaseException | None) -> None:
    """Call the functions of at_end(), each once: if one raises, the next call continues after it."""
    for functions in _at_end.values():
        while functions:
            functions.pop()(error)


def say_error(text: str) -> None:
    """Print an error as errors.say_error() does, without secrets in addresses."""
    errors.say_error(mask(text))


def say_traceback(error: BaseException) -> None:
    """Print the traceback of an error on stderr, with *** for the values of hide()."""
    errors.write_error(format_traceback(error))


def format_traceback(error: BaseException) -> str:
    """Return the traceback of an error, with *** for the values of hide()."""
    return mask_values("".join(traceback.format_exception(error)))


def code_of(error: SystemExit) -> int:
    """Return the exit code of a process that ends by sys.exit() with an error. The system keeps 8 bits of a
    number: the 256 of sys.exit(os.system(...)) would be 0, that of a run that is done."""
    return error.code & 0xFF or 1 if isinstance(error.code, int) else 1


def in_group() -> bool:
    """Return whether this process has joined a process group of several."""
    return bool(_at_end["processes"])


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
    return next((stream.buffer.raw.count for stream in _at_start), None)  # type: ignore[attr-defined]


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
