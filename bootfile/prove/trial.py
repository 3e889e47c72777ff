"""Run a command to its end, with SIGKILLs and restarts on the way, or with SIGKILLs to some of its ranks.

bootfile/history/compute.py starts jobs at a state of an old run. This runs any program from its beginning.
"""

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from bootfile.console.words import mask_words
from bootfile.ground.exit_codes import explain_exit_code
from bootfile.processes import sessions

_POLL = 0.005  # seconds: a short job takes a millisecond for a step
_PATIENCE = 300.0  # seconds from a SIGKILL to some ranks until the next generation
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
    start: Callable[[list[str], str, IO[Any]], Any] | None = None,
    watch: Callable[[], float] = float,
    kills: Sequence[float] = (),
    after_kill: Callable[[], list[str]] = list,
    stops: bool = False,
) -> list[float]:
    """Run a command to its end, and start it again after each SIGKILL. Return its progress at each SIGKILL.

    log: the file for its output.
    start: starts a command; default: sessions.start().
    watch: returns its progress: steps, or seconds.
    kills: the progress at which all its processes are killed, ascending.
    after_kill: called after each kill; returns the command of the restart, or [] if none follows.
    stops: send SIGTERM, after which it may save and end by itself, and SIGKILL after 60 s.
    Raises Failed.
    """
    start = start or sessions.start  # looked up here: tests replace it
    progress_at_kills: list[float] = []
    mark = os.path.abspath(log)
    with open(log, "ab") as output:
        for target in [*kills, float("inf")]:
            tasks: list[Any] = []  # [] if the start itself fails
            try:
                task = start(command, mark, output)
                tasks.append(task)
                while task.poll() is None and (progress := watch()) < target:
                    time.sleep(_POLL)
                # it may end on its own before a SIGKILL is due: then no restart follows
                has_ended = task.poll() is not None
                if stops and not has_ended:  # as a platform stops it
                    sessions.end([task], signal.SIGTERM)
                    deadline = time.monotonic() + _GRACE
                    while task.poll() is None and time.monotonic() < deadline:
                        time.sleep(_POLL)
            finally:  # also those that the command has left behind
                sessions.kill(tasks, mark)
            if has_ended and task.returncode:
                raise Failed(_failure(command, task.returncode, log), task.returncode)
            if has_ended:
                break
            progress_at_kills.append(max(progress, watch()))  # until the signal arrived
            command = after_kill()
            if not command:
                break
    return progress_at_kills


def choose_tries(count: int, first: int, last: int, gap: int = 1) -> list[list[float]]:
    """Return the steps of the SIGKILLs for each try of a run, later tries with earlier ones. Another try
    follows if the process was faster than a SIGKILL, or if no restart had steps left to train."""
    last = max(first, last)
    bounds = sorted({last, (first + last) // 2, first}, reverse=True)
    return [choose_steps(count, first, bound, gap) for bound in bounds]


def choose_steps(count: int, first: int, last: int, gap: int = 1, seed: int = 0) -> list[float]:
    """Return at most `count` random numbers in first..last, ascending: the same ones for a seed.

    gap: the range is divided into parts of this length, and each number is of another part.
    """
    draw = random.Random(seed)
    parts = range(first, last + 1, gap)
    chosen = sorted(draw.sample(parts, min(count, len(parts))))
    return [float(draw.randint(part, min(part + gap - 1, last))) for part in chosen]


def _failure(command: list[str], code: int, log: str) -> str:
    """Return the message of Failed, with the last line of the output or what a signal means. If torchrun has
    ended with its banner, the reason is the last error above it."""
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    reason = lines[-1] if lines else "it printed nothing"
    errors = [match[1] for match in map(_ERROR.fullmatch, lines) if match]
    if errors and _BANNER.fullmatch(reason):
        reason = errors[-1]
    if code < 0:  # a signal
        reason = explain_exit_code(code)
    return f"{' '.join(mask_words(command[1:])[0])} ended with {code}: {reason}"


class Losses:
    """The SIGKILLs of a run that begins now. Each one waits for the generation after the one before.

    log: the file for the output of the run, which is also its mark (sessions.py).
    progress: returns the steps so far.
    plan: (a step, ranks that get a SIGKILL after it), ascending.
    killed: (steps so far, ranks) of each SIGKILL.
    """

    def __init__(self, log: str, progress: Callable[[], int], plan: list[tuple[float, tuple[int, ...]]]):
        self._log = os.path.abspath(log)
        self._progress = progress
        self._plan = plan
        # the output of this run begins there: it may be made again
        self._begin = os.path.getsize(log) if os.path.exists(log) else 0
        self._gone = set[int]()  # processes of the last SIGKILL
        self._killed_at = 0.0
        self.killed: list[tuple[int, tuple[int, ...]]] = []

    @property
    def is_done(self) -> bool:
        """Return whether the job has continued after each SIGKILL, and none is left."""
        return len(self.killed) == len(self._plan) and self._gone.isdisjoint(self._read()[2])

    def watch(self) -> int:
        """Kill what is due, and return the steps so far. Raises Failed."""
        _, _, pids = self._read()
        steps = self._progress()
        # a generation that still names a killed process began before its loss was noticed
        if not self._gone.isdisjoint(pids):
            if time.monotonic() - self._killed_at > _PATIENCE:
                raise Failed(f"no generation began within {_PATIENCE:g} s", 1)
        elif pids and len(self.killed) < len(self._plan) and steps >= self._plan[len(self.killed)][0]:
            _, ranks = self._plan[len(self.killed)]
            self._gone = {pids[rank] for rank in ranks}
            self._killed_at = time.monotonic()
            # a process id of the log may be another program's by now: those with the mark are killed
            for pid in self._gone & sessions.find(self._log).keys():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.killed.append((steps, ranks))
        return steps

    def describe(self) -> str:
        """Return what was done, in words."""
        kills = [f"{' and '.join(map(str, ranks))} after step {steps}" for steps, ranks in self.killed]
        if not kills:
            return "no SIGKILL"
        return f"SIGKILL to rank {', '.join(kills)}; {self._read()[1]} generations"

    def explain(self, error: Failed) -> Failed:
        """Return an error of the run with the SIGKILLs before it and the last lines of the output added."""
        lines, _, _ = self._read()
        # the exit code 2, refused options, is possible only before the first SIGKILL
        code = 1 if self.killed else error.code
        return Failed(f"{self.describe()}: {error} ({' | '.join(lines[-4:])})", code)

    def _read(self) -> tuple[list[str], int, list[int]]:
        """Return (the whole lines of the output so far, the present generation, its process ids by rank)."""
        with open(self._log, "rb") as file:
            file.seek(self._begin)
            whole, _, _ = file.read().rpartition(b"\n")
        lines = [*filter(None, map(str.strip, whole.decode(errors="replace").splitlines()))]
        newest = [*filter(None, map(sessions.GENERATION.fullmatch, lines))][-1:]
        generation, pids = newest[0].groups() if newest else ("0", "")
        return lines, int(generation), [*map(int, pids.split())]
