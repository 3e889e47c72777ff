"""Run a command to its end, with SIGKILLs and restarts on the way."""

import contextlib
import functools
import random
import signal
import subprocess
import time
from collections.abc import Callable

import psutil

from common.console.arguments import mask_words
from common.distributed import preemption
from launch.explain import explain_exit_code

_POLL = 0.005  # seconds: a short job takes a millisecond for a step


class Failed(Exception):
    """A command ended with an error of its own. The message has the exit code and its last line."""


def run(
    command: list[str],
    log: str,
    watch: Callable[[], float],
    kills: list[float],
    after_kill: Callable[[], list[str]],
) -> list[float]:
    """Run a command to its end, and start it again after each SIGKILL. Return its progress at each SIGKILL.

    log: the file for its output.
    watch: returns its progress: steps, or seconds.
    kills: the progress at which all its processes are killed, ascending.
    after_kill: called after each kill; returns the command of the restart.
    Raises Failed.
    """
    happened = list[float]()
    with open(log, "ab") as output:
        for target in [*kills, float("inf")]:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                preexec_fn=functools.partial(preemption.die_with_parent, signal.SIGKILL),
            )  # fmt: skip
            try:
                while process.poll() is None and watch() < target:
                    time.sleep(_POLL)
                is_killed = process.poll() is None
            finally:
                kill_all(process)
            if not is_killed and process.returncode:
                raise Failed(_failure(command, process.returncode, log))
            if not is_killed:
                break
            happened.append(watch())
            command = after_kill()
    return happened


def kill_all(process: subprocess.Popen) -> None:
    """Kill a process and all that it started, and wait for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.poll() is None:
            process.send_signal(signal.SIGSTOP)  # it starts no more processes
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(family[1:], timeout=10)
    process.wait()


def choose_steps(count: int, first: int, last: int) -> list[float]:
    """Return at most `count` different numbers in first..last, ascending: always the same ones."""
    steps = range(first, last + 1)
    return sorted(random.Random(0).sample(steps, min(count, len(steps))))


def _failure(command: list[str], code: int, log: str) -> str:
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()] or ["it printed nothing"]
    words, _ = mask_words(command[1:])
    return f"{' '.join(words)} ended with {code}: {lines[-1] if code > 0 else explain_exit_code(code)}"
