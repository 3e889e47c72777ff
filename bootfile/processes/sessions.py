"""Start processes in the background, and kill them together with all that they started."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

from bootfile.processes import children

# the line of a job with --elastic true (common/elastic/members.py): process ids by rank
GENERATION = re.compile(r"(?:\[node \d+\] )?generation (\d+): pids ([\d ]+)")
_PROC = "/proc"
_ENDED = (b"Z", b"X", b"x")  # states of /proc/PID/stat: zombie, dead
_MARK = "BOOTFILE_PROCESSES_OF"  # the variable that marks a process and all that it starts


def start(
    command: list[str],
    mark: str,
    output: IO[Any],
    environment: dict[str, str] | None = None,
    cwd: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own. On Linux it is killed if this process ends.

    bootfile prove and launch simulate call it, from outside the job that they start.

    mark: a name, unique on this machine, that kill() finds. environment: default: that of this process.
    """
    variables = os.environ if environment is None else environment
    return children.start(
        command,
        env=marked(variables, mark),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def marked(environment: Mapping[str, str], mark: str) -> dict[str, str]:
    """Return an environment whose processes find() finds."""
    return {**environment, _MARK: mark}


def find(mark: str) -> dict[int, dict[str, Any]]:
    """Return the living processes of a mark: process id -> {"environ": its variables, "ppid": its parent}.

    Without /proc and without psutil the answer is {}: only the sessions of start() can be ended.
    """
    if os.path.isdir(_PROC):
        processes = _read_processes(os.fsencode(f"{_MARK}={mark}"))
    else:
        processes = _ask_psutil()
    # a child inherits the variable, also in another session or after its parent's end
    return {pid: facts for pid, facts in processes if facts["environ"].get(_MARK) == mark}


def _read_processes(wanted: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the living processes whose environment this user may read, and which has this text."""
    for name in os.listdir(_PROC):
        if not name.isdigit():
            continue
        try:
            with open(os.path.join(_PROC, name, "environ"), "rb") as file:
                content = file.read()
            if wanted not in content:  # the variables of all others are not taken apart
                continue
            with open(os.path.join(_PROC, name, "stat"), "rb") as file:
                status, parent = file.read().rpartition(b")")[2].split()[:2]  # a name may have a ) in it
        except OSError:  # it has just ended, or is another user's
            continue
        if status not in _ENDED:
            environ = {}
            for entry in content.rstrip(b"\0").split(b"\0"):
                variable, equals, value = os.fsdecode(entry).partition("=")
                if equals:
                    environ[variable] = value
            yield int(name), {"environ": environ, "ppid": int(parent)}


def _ask_psutil() -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the living processes, on a system without /proc; none without the package psutil."""
    try:
        import psutil
    except ImportError:
        return
    for process in psutil.process_iter(["environ", "ppid", "status"]):
        if process.info["status"] not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            yield process.pid, {"environ": process.info["environ"] or {}, "ppid": process.info["ppid"]}


def end(tasks: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    """Send a signal to the sessions of the tasks that still run."""
    for task in tasks:
        if task.poll() is None:
            os.killpg(task.pid, number)


def kill(tasks: list[subprocess.Popen[bytes]], mark: str) -> None:
    """Kill the tasks and all processes of the mark, also those in another session or without a parent. Wait
    for their end. `bootfile prove` and `launch simulate` call it at the end, also after an error."""
    end(tasks, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while True:  # repeatedly: a process may have forked another one before it was killed
        pids = find(mark)
        if not pids or time.monotonic() >= deadline:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for task in tasks:
            task.poll()
        time.sleep(0.01)
    for task in tasks:
        task.wait()
