"""Start processes in the background, and kill them together with all that they started."""

import contextlib
import functools
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from typing import IO, Any

import psutil

from bootfile.processes import signals

# the line of a job with --elastic true (common/distributed/members.py): process ids by rank
GENERATION = re.compile(r"(?:\[node \d+\] )?generation (\d+): pids ([\d ]+)")
_MARK = "BOOTFILE_PROCESSES_OF"  # the variable that marks a process and all that it starts


def start(
    command: list[str],
    mark: str,
    output: IO[Any],
    environment: dict[str, str] | None = None,
    cwd: str | None = None,
) -> subprocess.Popen:
    """Start a command in a session of its own. On Linux it is killed if this process ends.

    mark: a name, unique on this machine, that kill() finds. environment: default: that of this process.
    """
    return subprocess.Popen(
        command,
        env=marked(os.environ if environment is None else environment, mark),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=functools.partial(signals.die_with_parent, signal.SIGKILL),
    )


def marked(environment: Mapping[str, str], mark: str) -> dict[str, str]:
    """Return an environment whose processes find() finds."""
    return {**environment, _MARK: mark}


def find(mark: str) -> dict[int, dict[str, Any]]:
    """Return the living processes of a mark: process id -> environ, ppid and status as psutil has them."""
    alive = {}
    for process in psutil.process_iter(["environ", "ppid", "status"]):
        facts = process.info
        is_own = (facts["environ"] or {}).get(_MARK) == mark  # None: another user's
        if is_own and facts["status"] not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            alive[process.pid] = facts
    return alive


def end(tasks: Iterable[subprocess.Popen], number: int) -> None:
    """Send a signal to the sessions of the tasks that still run."""
    for task in tasks:
        if task.poll() is None:
            os.killpg(task.pid, number)


def kill(tasks: list[subprocess.Popen], mark: str) -> None:
    """Kill the tasks and all processes of the mark, also those in another session or without a parent. Wait
    for their end."""
    end(tasks, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while (pids := find(mark)) and time.monotonic() < deadline:  # again: some may just have forked
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for task in tasks:
            task.poll()
        time.sleep(0.01)
    for task in tasks:
        task.wait()
