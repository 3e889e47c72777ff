"""How a job ends: one clear line and an exit code.

0        done
1        an error in the program, with its traceback
2        bad input: an argument, a path or a file; no result was written
4        the processes did not find each other
5        contact with another process was lost
6        the last results could not be written
7        training diverged: too many steps in a row without a finite loss and gradient
130      interrupted by Ctrl-C (SIGINT), after a last checkpoint if training had begun
128 + n  a process of this node was ended by signal n
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType

BAD_INPUT, NO_RENDEZVOUS, LOST_CONTACT, NOT_SAVED, DIVERGED = 2, 4, 5, 6, 7
INTERRUPTED = 130
# file descriptor: the process that started this one prints a shared error once
ERROR_PIPE = "BOOTFILE_ERROR_PIPE"

_on_failure: list[Callable[[Exception], object]] = []
_on_success: list[Callable[[], object]] = []
_before_leaving: list[Callable[[], object]] = []


class BadInput(ValueError):
    """Something from outside (argument, file, folder, network) is not usable. The message carries the
    values."""

    code = BAD_INPUT


class NoRendezvous(BadInput):
    """The processes did not find each other, or found that they do not belong together."""

    code = NO_RENDEZVOUS


class MissingPackage(BadInput):
    """A package cannot be imported. The message has the reason and the command that installs it."""


def printable(text: str) -> str:
    """Return the text with every character that is not printable as a backslash escape: one line, which does
    not control a terminal. Backslashes of the text itself stay as they are."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


def print_line(line: str) -> None:
    """Print a line at once. A closed standard output is ignored."""
    with contextlib.suppress(OSError, ValueError):
        print(line, flush=True)


def import_optional(module: str, purpose: str, package: str | None = None) -> ModuleType:
    """Return a module, imported. Raises MissingPackage.

    purpose: begins the message, for example "packs need Arrow". package: as pip knows it, default `module`.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # what was built for another NumPy, or has no library, raises other types, too
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise MissingPackage(f"{purpose} ({reason}): pip install {package or module}") from error


def on_failure(function: Callable[[Exception], object]) -> None:
    """Call function(error) when main() ends with an exception that is not BadInput; it may leave the
    process."""
    _on_failure.append(function)


def before_leaving(function: Callable[[], object]) -> None:
    """Call function() when main() ends with an exception, BadInput or not, before those that were named
    earlier and before anything else is done."""
    _before_leaving.append(function)


def on_success(function: Callable[[], object]) -> None:
    """Call function() when main() has returned, before those that were named earlier; it may leave the
    process."""
    _on_success.append(function)


def say_error(text: str) -> None:
    """Print `error: text` as one printable line on stderr: here, or once for all processes that one parent
    started."""
    line = f"error: {printable(' '.join(text.split()))}\n"
    with contextlib.suppress(OSError, ValueError):  # who listened may be gone, and the process must go on
        if ERROR_PIPE in os.environ:
            os.write(int(os.environ[ERROR_PIPE]), line.encode())
        else:
            sys.stderr.write(line)
            sys.stderr.flush()


def leave(code: int) -> None:
    """End the process now: no destructor of a communication library gets a chance to wait for a lost peer."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def in_group() -> bool:
    """Return whether this process has joined others."""
    return bool(_on_failure)


def run_before_leaving() -> None:
    """Call the functions of before_leaving(), the last one first."""
    for function in reversed(_before_leaving):
        function()


def run_on_failure(error: Exception) -> None:
    """Call the functions of on_failure()."""
    for function in _on_failure:
        function(error)


def run_on_success() -> None:
    """Call the functions of on_success(), the last one first."""
    for function in reversed(_on_success):
        function()
