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
import functools
import os
import sys

from common.text import printable

BAD_INPUT, NO_RENDEZVOUS, LOST_CONTACT, NOT_SAVED, DIVERGED = 2, 4, 5, 6, 7
INTERRUPTED = 130
# file descriptor: the process that started this one prints a shared error once
ERROR_PIPE = "BOOTFILE_ERROR_PIPE"

_ONE_VALUE = "Expected more than 1 value per channel when training"  # torch's BatchNorm

_on_failure, _on_success, _before_leaving = [], [], []


class BadInput(ValueError):
    """Something from outside (argument, file, folder, network) is not usable. The message carries the
    values."""

    code = BAD_INPUT


class NoRendezvous(BadInput):
    """The processes did not find each other, or found that they do not belong together."""

    code = NO_RENDEZVOUS


def on_failure(function) -> None:
    """Call function(error) when main() ends with an exception that is not BadInput; it may leave the
    process."""
    _on_failure.append(function)


def before_leaving(function) -> None:
    """Call function() when main() ends with an exception, BadInput or not, before those that were named
    earlier and before anything else is done."""
    _before_leaving.append(function)


def on_success(function) -> None:
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


@contextlib.contextmanager
def _batch_of_one():
    """Turn BatchNorm's refusal of a single sample into BadInput with the arguments that decide the batch."""
    try:
        yield
    except ValueError as error:
        if _ONE_VALUE not in str(error):
            raise
        from common import arguments  # which imports this module

        names, given = ("batch_size", "accumulate", "processes_per_node", "world_size"), arguments.settings()
        batch = " ".join(f"--{name} {given[name]}" for name in names if given.get(name) is not None)
        raise BadInput(f"{batch}: {error}: BatchNorm needs at least 2 samples in each process") from error


def entry(main):
    """Decorate a job's main(): BadInput and Ctrl-C become one line `error: ...` and an exit code."""

    @functools.wraps(main)
    def run():
        from common.distributed import preemption  # which imports this module

        try:
            preemption.end_on_interrupt()
            with _batch_of_one():
                main()
        except KeyboardInterrupt:
            say_error("interrupted")
            for function in reversed(_before_leaving):
                function()
            leave(INTERRUPTED)
        except BadInput as error:
            say_error(str(error))
            for function in reversed(_before_leaving):
                function()
            if error.code == BAD_INPUT and not _on_failure:  # alone: no communication to get stuck in
                sys.exit(error.code)
            leave(error.code)
        except Exception as error:
            for function in reversed(_before_leaving):
                function()
            for function in _on_failure:
                function(error)
            raise
        for function in reversed(_on_success):
            function()

    return run
