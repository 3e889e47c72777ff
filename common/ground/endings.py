"""The end of a job: what it does then, in which order, and one clear line for an error.

Exit codes, in addition to those of bootfile/ground/errors.py:

4        the processes did not connect to each other
5        the connection to another process was lost
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from bootfile.ground import errors
from bootfile.ground.errors import LOST_CONTACT as LOST_CONTACT
from bootfile.ground.errors import NO_RENDEZVOUS as NO_RENDEZVOUS
from bootfile.ground.errors import BadInput
from bootfile.ground.secrets import mask, mask_values

STARTED = time.monotonic()  # a job imports this module before torch

# What a job does at its end, in this order.
PLACES = ("results", "upload", "folder", "loaders", "processes", "device")
_sources: list[Any] = []  # see explain_with() and explained_by()
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
    processes and threads; "" for others. The entry of a job calls it when main() has raised the error, on
    each rank that did."""
    if _ONE_VALUE in str(error):
        return f"{error}: BatchNorm needs at least 2 samples in each process: raise --batch_size"
    for source in reversed(_sources):
        line = source.explain(error)
        if line:
            return line
    from bootfile.machine import process_limits  # only after an error

    return process_limits.explain(error)


def explain_with(source: Any) -> None:
    """Ask an object for a line about the error that ends main(): the loader of the training, whose
    explain(error) returns the line or "". It is called on every rank before the first step."""
    _sources[:] = [source]


@contextlib.contextmanager
def explained_by(source: Any) -> Iterator[None]:
    """Ask another object first about an error of this block. An object without explain() is not asked."""
    has_lines = hasattr(source, "explain")
    if has_lines:
        _sources.append(source)
    yield
    if has_lines:  # after an error it stays, because main() ends
        _sources.remove(source)


def at_end(place: str, function: Callable[[BaseException | None], object]) -> None:
    """Register function(error) for the end of main(): `error` is the exception that ended it, or None.

    place: one of PLACES, whose order is kept. At one place the function that was registered last is called
    first. A function may end the process.
    """
    _at_end[place].append(function)


def at_success(place: str, function: Callable[[], object]) -> None:
    """Register function() as at_end() does, for a main() that ends without an exception."""

    def call_without_error(error: BaseException | None) -> None:
        if not error:
            function()

    at_end(place, call_without_error)


def end(error: BaseException | None) -> None:
    """Call the functions of at_end(), each once: if one raises, the next call continues after it. The entry
    of a job calls it in the main thread of each process when main() has ended."""
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


def in_group() -> bool:
    """Return whether this process has joined a process group of several."""
    return bool(_at_end["processes"])
