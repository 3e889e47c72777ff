"""Tell which limit keeps this process from starting another process or thread, which count alike.

The limits are pids.max of the control groups (docker run --pids-limit, TasksMax of systemd, podPidsLimit of
Kubernetes) and `ulimit -u`, which counts all processes of a user. Libraries in C end the process, or print a
line of their own, when they cannot start a thread. So a job asks for the room before it starts many.

This module imports no torch. Source: Linux, admin-guide/cgroup-v2.rst (pids.max); getrlimit(2).
"""

import contextlib
import errno
import os
import resource
import sys
from pathlib import Path

from bootfile.machine import control_groups
from bootfile.machine.control_groups import MANY_PROCESSES, ProcessLimit

_ADVICE = "raise it (docker run --pids-limit, TasksMax, ulimit -u)"
_NO_THREAD = "can't start new thread"  # Python's message
_ALL_USERS = "4294967295"  # in /proc/self/uid_map of a process that is in no user namespace
_STARTS = {"fork", "forkpty", "fork_exec", "_fork_exec"}  # functions that start a process


def find_limit(root: str = "/") -> ProcessLimit | None:
    """Return the limit that leaves the least room for more processes and threads; None without one. root: see
    control_groups.py."""
    limits = control_groups.process_limits(root)
    own_limit = _user_limit()
    if own_limit:
        limits.append(own_limit)
    return min(limits, key=_room, default=None)


def _room(limit: ProcessLimit) -> int:
    return limit.most - limit.used


def shortage(needed: int, what: str, root: str = "/") -> str:
    """Return a line if fewer than `needed` processes and threads may be started, else "".

    what: needs them, in the plural, for example "8 workers".
    """
    limit = find_limit(root)
    if limit is None or needed <= _room(limit):
        return ""
    return f"{_describe(limit)}: {what} need about {needed} more: {_ADVICE}"


def explain(error: BaseException, what: str = "") -> str:
    """Return one line for an error because the kernel refused to start a thread or a process; "" for another
    error. what: see shortage(); also how many it needs, for example "8 workers need about 24"."""
    kind = _refused_kind(error)
    return f"a {kind} cannot be started ({error}): {explain_refusal(what)}" if kind else ""


def explain_refusal(what: str = "") -> str:
    """Return the limit that was reached, as a part of a line. Others may have ended since."""
    needs = f", and {what}" if what else ""
    limit = find_limit()
    if limit is None:  # as in a pod, whose limit is that of a group that is not visible inside
        return f"the limit of processes and threads is reached{needs}: {_ADVICE}"
    return f"{_describe(limit)}{needs}: {_ADVICE}"


def _describe(limit: ProcessLimit) -> str:
    return f"limit of {limit.most} processes and threads ({limit.name}), and {limit.used} run"


def _refused_kind(error: BaseException) -> str:
    """Return "thread" or "process" if the kernel refused to start one; "" for another error."""
    if isinstance(error, RuntimeError) and str(error).startswith(_NO_THREAD):
        return "thread"
    trace = error.__traceback__
    if not isinstance(error, OSError) or error.errno != errno.EAGAIN or trace is None:
        return ""
    while trace.tb_next:
        trace = trace.tb_next
    # A pipe that is full gives the same error: only the function that failed tells them apart.
    names = trace.tb_frame.f_code.co_names
    return "process" if _STARTS.intersection(names) else ""


def _user_limit() -> ProcessLimit | None:
    """Return `ulimit -u` with what runs of this user; None if it is not enforced, or high."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if sys.platform != "linux" or not 0 <= most < MANY_PROCESSES or _is_exempt():
        return None
    return ProcessLimit(most, _count_of_user(os.getuid()), "ulimit -u")


def _is_exempt() -> bool:
    """Return whether the kernel enforces no `ulimit -u` for this process: that of root outside of user
    namespaces. In one, as in a container without root, root is a user outside."""
    with contextlib.suppress(OSError, IndexError):
        return os.getuid() == 0 and Path("/proc/self/uid_map").read_text().split()[2] == _ALL_USERS
    return False


def _count_of_user(user: int) -> int:
    """Return the number of processes and threads of a user, as far as this process can see them."""
    count = 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, KeyError):  # it has ended
            status = _status(name)
            if int(status["Uid"].split()[0]) == user:
                count += int(status["Threads"])
    return count


def _status(process: str) -> dict[str, str]:
    """Return the facts in /proc/PROCESS/status."""
    lines = Path("/proc", process, "status").read_text(errors="replace").splitlines()
    facts = {}
    for line in lines:
        name, _, value = line.partition(":")
        facts[name] = value.strip()
    return facts
