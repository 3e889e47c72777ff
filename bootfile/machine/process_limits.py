"""Tell which limit keeps this process from starting another process or thread, which count alike.

The limits are pids.max of the control groups (docker run --pids-limit, TasksMax of systemd, podPidsLimit of
Kubernetes). Libraries in C end the process, or print a line of their own, when they cannot start a thread. So
a job asks for the room before it starts many. Outside: `ulimit -u`, which counts all processes of a user; if
it is reached, the line names it.

This module imports no torch. Source: Linux, admin-guide/cgroup-v2.rst (pids.max).
"""

import errno
import resource

from bootfile.machine.control_groups import ProcessLimit, process_limits

_ADVICE = "raise it (docker run --pids-limit, TasksMax, ulimit -u)"
_NO_THREAD = "can't start new thread"  # Python's message
_STARTS = {"fork", "forkpty", "fork_exec", "_fork_exec"}  # functions that start a process


def find_limit(root: str = "/") -> ProcessLimit | None:
    """Return the limit that leaves the least room for more processes and threads; None without one. root: see
    control_groups.py."""
    return min(process_limits(root), key=lambda limit: limit.most - limit.used, default=None)


def shortage(needed: int, what: str, root: str = "/") -> str:
    """Return a line if fewer than `needed` processes and threads may be started, else "".

    what: needs them, in the plural, for example "8 workers".
    """
    limit = find_limit(root)
    if limit is None or needed <= limit.most - limit.used:
        return ""
    return f"{_describe(limit)}: {what} need about {needed} more: {_ADVICE}"


def explain(error: BaseException, what: str = "") -> str:
    """Return one line for an error because the kernel refused to start a thread or a process; "" for another
    error. what: see shortage(); also how many it needs, for example "8 workers need about 24"."""
    kind = _refused_kind(error)
    return f"a {kind} cannot be started ({error}): {explain_refusal(what)}" if kind else ""


def explain_refusal(what: str = "") -> str:
    """Return the limit that was reached, as a part of a line. Others may have ended since."""
    limit = find_limit()
    of_user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    # none is visible in a pod, whose limit is that of a group outside; one with more room was not reached
    is_known = limit and not 0 <= of_user < limit.most - limit.used
    reached = _describe(limit) if limit and is_known else "the limit of processes and threads is reached"
    return f"{reached}{what and f', and {what}'}: {_ADVICE}"


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
    # a pipe that is full gives the same error: only the function that failed tells them apart
    return "process" if _STARTS.intersection(trace.tb_frame.f_code.co_names) else ""
