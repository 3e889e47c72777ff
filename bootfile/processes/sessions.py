"""Start processes that end with this one, and end them: by themselves first, by SIGKILL at the limit, or all
that they have started together.

What starts processes decides what their ends mean: which of them failed first (the launcher of
common/distributed), or whether another one takes the place (the agent of common/elastic).
"""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from bootfile.processes import ends, signals

# the line of a job with --elastic true (common/elastic/members.py): process ids by rank
GENERATION = re.compile(r"(?:\[node \d+\] )?generation (\d+): pids ([\d ]+)")
_MARK = "BOOTFILE_PROCESSES_OF"  # the variable that marks a process and all that it starts
_LAST = 5.0  # seconds for the end of a killed process


def why_no_fork() -> str:
    """Return why this process cannot fork others in place of starting them; "" if it can.

    An elastic job and `bootfile prove` ask before they fork anything. A child of a process that has opened
    the GPUs cannot use them.
    """
    import torch  # a launcher of programs needs none

    from bootfile.ground import accelerator

    # a fork aborts at its end in torch 2.1
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6) or sys.platform != "linux":
        return f"it needs torch 2.6 on Linux, this is {torch.__version__} on {sys.platform}"
    return "it was not run on GPUs yet (--enable_gpu=false)" if accelerator.count() else ""


def start_child(command: list[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a command in a session of its own, and return it. On Linux it is killed if this process ends.

    options: those of Popen.
    """
    dies = functools.partial(signals.die_with_parent, signal.SIGKILL)
    return subprocess.Popen(command, start_new_session=True, preexec_fn=dies, **options)


def wait_or_kill(children: Sequence["subprocess.Popen[Any]"], seconds: float) -> None:
    """Wait until all children have ended, and kill those that still run after `seconds`.

    Send them a signal before, or close their input, so that they end by themselves.
    """
    deadline = time.monotonic() + seconds
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            # a killed process may wait for a mount that hangs: this one must not wait for it for ever
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_LAST)


def start(
    command: list[str],
    mark: str,
    output: IO[Any],
    environment: dict[str, str] | None = None,
    cwd: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command as start_child() does. bootfile prove and launch simulate call it, from outside the job
    that they start.

    mark: a name, unique on this machine, that kill() finds. environment: default: that of this process.
    """
    env = marked(os.environ if environment is None else environment, mark)
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
    return start_child(command, env=env, cwd=cwd, **pipes)


def marked(environment: Mapping[str, str], mark: str) -> dict[str, str]:
    """Return an environment whose processes find() finds."""
    return {**environment, _MARK: mark}


def find(mark: str) -> dict[int, dict[str, Any]]:
    """Return the living processes of a mark: process id -> {"environ": its variables, "ppid": its parent}.

    Without /proc the answer is {}: only the sessions of start() can be ended.
    """
    wanted = os.fsencode(f"{_MARK}={mark}")
    processes = {}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else [])):
        # OSError: it has just ended, or is another user's
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            # a child inherits the variable, also in another session or after its parent's end
            entries = file.read().split(b"\0")
            state, parent, _ = ends.read_stat(pid)
            if wanted in entries and state not in ends.ENDED:
                environ = dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
                processes[pid] = {"environ": environ, "ppid": int(parent)}
    return processes


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
