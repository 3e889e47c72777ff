"""The main() of a job: every end is one line and an exit code, Ctrl-C included.

A job imports this module before torch: importing torch takes seconds, and a Ctrl-C there would print a
traceback of torch's own files. With --help it arranges that torch is not imported (stand_ins.py).
"""

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable

from common import exits
from common.distributed import preemption
from common.exits import BAD_INPUT, INTERRUPTED, BadInput, leave, say_error

_ONE_VALUE = "Expected more than 1 value per channel when training"  # torch's BatchNorm
# options that decide a batch
_BATCH = ("batch_size", "batch_size_per_gpu", "accumulate", "processes_per_node", "world_size")


def entry(main: Callable[[], object]) -> Callable[[], None]:
    """Decorate a job's main(): BadInput and Ctrl-C become one line `error: ...` and an exit code."""

    @functools.wraps(main)
    def run() -> None:
        if _wants_help():
            from common.command_line import stand_ins

            stand_ins.run(main)
        try:
            preemption.end_on_interrupt()
            with _batch_of_one():
                main()
            exits.run_on_success()
        except KeyboardInterrupt:
            say_error("interrupted")
            exits.run_before_leaving()
            leave(INTERRUPTED)
        except BadInput as error:
            say_error(str(error))
            exits.run_before_leaving()
            if error.code == BAD_INPUT and not exits.in_group():  # alone: no communication to get stuck in
                sys.exit(error.code)
            leave(error.code)
        except Exception as error:
            exits.run_before_leaving()
            exits.run_on_failure(error)
            raise

    return run


@contextlib.contextmanager
def _batch_of_one():
    """Turn BatchNorm's refusal of a single sample into BadInput with the options that decide the batch."""
    try:
        yield
    except ValueError as error:
        if _ONE_VALUE not in str(error):
            raise
        given = _given(sys.argv[1:])
        batch = [f"--{name} {given[name]}" for name in _BATCH if name in given]
        place = f"{' '.join(batch)}: " if batch else ""
        raise BadInput(f"{place}{error}: BatchNorm needs at least 2 samples in each process") from error


def _given(words: list[str]) -> dict[str, str]:
    """Return the options of a command line by name, with _ for -."""
    found = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            found[name[2:].replace("-", "_")] = value if equals else following
    return found


def _end(number: int, frame: object) -> None:
    say_error("interrupted")
    os._exit(INTERRUPTED)  # nothing has begun that would have to end


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell starts background jobs without
    signal.signal(signal.SIGINT, _end)


# Threads of OpenMP wait for each other at the end of every operation, and by default libgomp (of PyTorch's
# wheels for Linux) spins for milliseconds first. If other processes use the cores, that time is lost: a
# thread that spins keeps the one that it waits for from running. It is read when torch is imported.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"  # tens of microseconds; libgomp's own: 300,000


def _wants_help() -> bool:
    """Return whether --help is on the command line (what follows -- does not count), or a shell asks for
    completions."""
    words = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    return not {"-h", "--help"}.isdisjoint(words) or "_ARGCOMPLETE" in os.environ


if _wants_help():
    from common.command_line import stand_ins

    stand_ins.install()  # before the job imports torch
