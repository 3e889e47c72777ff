"""Errors with one clear line, the exit codes of a run, and lines that are safe to print.

0        done
1        an error in the program, with its traceback
2        bad input: an argument, a path or a file; no result was written
6        the last results could not be written, or a file system did not answer: a restart may succeed
7        training diverged: too many steps in a row without a finite loss and gradient
130      interrupted by Ctrl-C (SIGINT), after a last checkpoint if training had begun
128 + n  signal n ended a process of this node
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType

# the exit codes above, and two of jobs (common/ground/endings.py)
BAD_INPUT = 2
NO_RENDEZVOUS = 4
LOST_CONTACT = 5
NOT_SAVED = 6
DIVERGED = 7
INTERRUPTED = 130
# variable with a file descriptor: errors go to the parent process, which prints a shared error only once
ERROR_PIPE = "BOOTFILE_ERROR_PIPE"

# called with each text before it is printed: a job hides the values of its secret options
masks: list[Callable[[str], str]] = []


class BadInput(ValueError):
    """An input (argument, file, folder, network) is not usable. The message shows the values."""

    code = BAD_INPUT


class Unavailable(BadInput):
    """A file system does not answer, or its connection was lost: nothing is wrong with the input, and a
    restart may succeed."""

    code = NOT_SAVED


class MissingPackage(BadInput, ImportError):
    """A package cannot be imported. The message has the reason and the command that installs it."""


def printable(text: str) -> str:
    """Return the text with a backslash escape for every character that is not printable, so that it is one
    line and cannot control a terminal. Backslashes in the text do not change."""
    escaped = (each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    return "".join(escaped)


def mask(text: str) -> str:
    """Return the text after all `masks`."""
    for change in masks:
        text = change(text)
    return text


def print_line(line: str) -> None:
    """Print a line at once, with escapes for what is not printable, or not in the encoding of standard
    output. `masks` hide secrets in it. A closed standard output is ignored."""
    text = printable(mask(line))
    # a notebook may have replaced standard output, by one of another kind of encoding, or of none
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with contextlib.suppress(LookupError, TypeError, ValueError):
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    with contextlib.suppress(OSError, ValueError):
        print(f"{text}\n", end="", flush=True)


def in_one_line(error: BaseException, most: int = 200) -> str:
    """Return the class and the text of an error as one line of at most `most` characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]


class Once:
    """A function(line, subject="") that calls say(line) the first time only; of a subject only for its first
    line. It can be pickled if `say` can."""

    def __init__(self, say: Callable[[str], object]):
        self._say = say
        self._said = set[str]()

    def __call__(self, line: str, subject: str = "") -> None:
        if (subject or line) not in self._said:
            self._said.add(subject or line)
            self._say(line)


def import_optional(module: str, purpose: str, package: str | None = None) -> ModuleType:
    """Import a module and return it. Raises MissingPackage.

    purpose: begins the message, for example "packs need Arrow". package: its name for pip (default: module).
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # not only ImportError: it may be built for another NumPy, or lack a library
        reason = in_one_line(error, 1000)
        raise MissingPackage(f"{purpose} ({reason}): pip install {package or module}") from error


def write_error(text: str) -> None:
    """Write text on standard error, which may be closed."""
    error_writers[-1](text)


def _write_error(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


# The last one writes the errors: a job adds a function whose text arrives although sys.stderr was replaced.
error_writers: list[Callable[[str], None]] = [_write_error]


def say_error(text: str) -> None:
    """Print `error: text` as one printable line on stderr. Processes that one parent started send it to the
    parent, which prints it once."""
    line = f"error: {printable(' '.join(mask(text).split()))}\n"
    try:
        # each process has the same error: the parent prints it once
        os.write(int(os.environ[ERROR_PIPE]), line.encode())
    except (KeyError, OSError, ValueError, OverflowError):  # no parent
        write_error(line)


def leave(code: int) -> None:
    """End the process at once, without destructors: a communication library may wait for a lost peer in its
    destructor."""
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, None, or an object of the job's code
                stream.flush()
    finally:
        os._exit(code)
