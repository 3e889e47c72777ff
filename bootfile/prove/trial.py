"""Run a command to its end, with SIGKILLs and restarts on the way."""

# The verbs on old runs start jobs with history/compute.py: at a state of a run, and compared with it on the
# way. This runs any program from its beginning, and knows nothing of its files. Both use sessions.py.

import os
import random
import re
import signal
import time
from collections.abc import Callable
from typing import IO, Any

from bootfile.console.words import mask_words
from bootfile.ground.exit_codes import explain_exit_code
from bootfile.processes import sessions

_POLL = 0.005  # seconds: a short job takes a millisecond for a step
_GRACE = 60.0  # seconds for a program to end after SIGTERM
# `error: ...` of our loops and of argparse, the last line of a traceback; torchrun puts the rank before it
_ERROR = re.compile(
    r"(?:\[\w+\]: ?)?((?:\S+: )?error: \S.*|(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception): \S.*)"
)
_BANNER = re.compile("=+|-+")


class Failed(Exception):
    """A command ended with an error of its own. The message has the exit code and its last line."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


def run(
    command: list[str],
    log: str,
    watch: Callable[[], float],
    kills: list[float],
    after_kill: Callable[[], list[str]],
    start: Callable[[list[str], str, IO[Any]], Any] | None = None,
    stops: bool = False,
) -> list[float]:
    """Run a command to its end, and start it again after each SIGKILL. Return its progress at each SIGKILL.

    log: the file for its output.
    watch: returns its progress: steps, or seconds.
    kills: the progress at which all its processes are killed, ascending.
    after_kill: called after each kill; returns the command of the restart.
    start: starts a command; default: sessions.start().
    stops: send SIGTERM, after which it may save and end by itself, and SIGKILL after 60 s.
    Raises Failed.
    """
    start = start or sessions.start
    progress_at_kills: list[float] = []
    mark = os.path.abspath(log)
    with open(log, "ab") as output:
        for target in [*kills, float("inf")]:
            tasks: list[Any] = []  # [] if the start itself fails
            try:
                task = start(command, mark, output)
                tasks.append(task)
                while True:
                    # it may end on its own before a SIGKILL is due: then no restart follows
                    has_ended = task.poll() is not None
                    if has_ended:
                        break
                    progress = watch()
                    if progress >= target:
                        if stops:
                            _stop(task)
                        break
                    time.sleep(_POLL)
            finally:  # also those that the command has left behind
                sessions.kill(tasks, mark)
            if has_ended:
                if task.returncode:
                    raise Failed(_failure(command, task.returncode, log), task.returncode)
                break
            progress_at_kills.append(max(progress, watch()))  # until the signal arrived
            command = after_kill()
    return progress_at_kills


def _stop(task: Any) -> None:
    """Ask the processes of a session to stop, as a platform does, and wait for their end, 60 s at most."""
    sessions.end([task], signal.SIGTERM)
    deadline = time.monotonic() + _GRACE
    while task.poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL)


def lower_bounds(first: int, last: int) -> list[int]:
    """Return the largest progress at which to kill: for the first try, and for further ones, if the process
    was faster than the SIGKILL, and no restart had to train on. The last one is the earliest moment."""
    return sorted({last, (first + last) // 2, first}, reverse=True)


def choose_steps(count: int, first: int, last: int, gap: int = 1, seed: int = 0) -> list[float]:
    """Return at most `count` numbers in first..last, ascending: always the same ones for a seed.

    gap: the range is divided into parts of this length, and each number is of another part.
    """
    draw = random.Random(seed)
    parts = range(first, last + 1, gap)
    chosen = sorted(draw.sample(parts, min(count, len(parts))))
    return [float(draw.randint(part, min(part + gap - 1, last))) for part in chosen]


def _failure(command: list[str], code: int, log: str) -> str:
    """Return the message of Failed: the last line of the output, or what a signal means. Below the banner of
    torchrun the error of its last process counts."""
    reason = "it printed nothing"
    error = ""
    with open(log, encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.strip():
                reason = line.strip()
            match = _ERROR.fullmatch(line.strip())
            if match:
                error = match[1]
    if error and _BANNER.fullmatch(reason):
        reason = error
    if code <= 0:
        reason = explain_exit_code(code)
    words, _ = mask_words(command[1:])
    return f"{' '.join(words)} ended with {code}: {reason}"
