"""Why a process has ended: its exit code or signal, and whether the kernel's OOM killer has ended it."""

import contextlib
import fcntl
import os
import signal
import struct
from pathlib import Path

from bootfile.machine.control_groups import find_folders, read_number, read_text

# PIDFD_GET_INFO of <linux/pidfd.h>, since Linux 6.15 also for a process whose parent has read its exit code
_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
_HAS_EXIT = 8  # bit of the mask: exit_code is known
_ENDED = ("Z", "X", "x")  # states of /proc/PID/stat: zombie, dead
_UNLIMITED = 2**60  # bytes: a limit above is none
_OOM = "the kernel's OOM killer ended a process of this"


class Process:
    """A process of this node whose end is watched; usually not a child of this one.

    pid: the id of a process that runs now.
    """

    def __init__(self, pid: int):
        self.pid = pid
        self.descriptor: int | None = None  # readable when the process has ended
        # the system gives an id out again: the time of the start tells whether it is the same process
        self._started = _read_stat(pid)[1]
        with contextlib.suppress(OSError, AttributeError):  # AttributeError: not Linux
            self.descriptor = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Return whether the process has ended. A process that only stopped has not."""
        state, started = _read_stat(self.pid)
        return not state or state in _ENDED or started != self._started

    def read_status(self) -> int | None:
        """Return the status of an ended process, as os.waitpid() does. Return None if it is not known: on
        Linux before 6.15, it cannot be read after the parent."""
        if self.descriptor is not None:
            # Linux 6.15 gives the status also after the parent has read it
            buffer = bytearray(struct.pack("Q", _HAS_EXIT).ljust(64, b"\0"))
            with contextlib.suppress(OSError):
                fcntl.ioctl(self.descriptor, _GET_INFO, buffer)
                if struct.unpack_from("Q", buffer)[0] & _HAS_EXIT:
                    return int(struct.unpack_from("i", buffer, 60)[0])
        # the parent has not read the status of a zombie: it is the 52nd field of /proc/PID/stat
        state, started = _read_stat(self.pid)
        if state in _ENDED and started == self._started:
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{self.pid}/stat") as file:
                return int(file.read().rpartition(")")[2].split()[49])
        return None

    def close(self) -> None:
        """Release the descriptor."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def is_stopped(pid: int) -> bool:
    """Return whether a signal (SIGSTOP) or a debugger holds a process of this node."""
    return _read_stat(pid)[0] in ("t", "T")


def start_of(pid: int) -> str:
    """Return when a process of this node started, which tells it from a later one with the same id. Return ""
    if it has ended, and without /proc."""
    state, started = _read_stat(pid)
    return "" if state in _ENDED else started


def _read_stat(pid: int) -> tuple[str, str]:
    """Return (state, time of its start) of a process; empty texts without one, and without /proc."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # the name of the program comes before it in brackets, and may have any character in it
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


class MemoryKills:
    """The processes that the kernel's OOM killer ends in the memory group (cgroup) of this process, from now
    on. Without a group they are those of the machine. root: see control_groups.py."""

    def __init__(self, root: str = "/"):
        # memory.events is of version 2, the others of version 1
        folders = find_folders("memory", root)
        counters = [folder / name for folder in folders for name in ("memory.events", "memory.oom_control")]
        counter = next((path for path in counters if path.exists()), None)
        # the counter of the whole machine may count processes of others
        self._where = "container" if counter else "machine"
        self._file = counter or Path(root, "proc/vmstat")
        names = ("memory.max", "memory.limit_in_bytes")
        limits = (read_number(folder / name) for folder in folders for name in names)
        self._limit = min([_UNLIMITED, *(limit for limit in limits if limit is not None)])
        self._before = self._count()

    def explain(self) -> str:
        """Return ": the kernel's OOM killer ended a process of this container (memory limit 2.0 GB)", or ""
        if it has ended none since the object was made."""
        if self._count() <= self._before:
            return ""
        limit = f" (memory limit {self._limit / 2**30:.1f} GB)" if self._limit < _UNLIMITED else ""
        return f": {_OOM} {self._where}{limit}"

    def _count(self) -> int:
        lines = read_text(self._file).splitlines()  # one of them is "oom_kill N"
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def describe(status: int | None, kills: MemoryKills) -> str:
    """Return how a process has ended: "was killed by SIGKILL: ...", "ended with exit code 1".

    status: as os.waitpid() returns it, None if it is not known. kills: made before the process ended.
    """
    killed = kills.explain()
    if status is None:
        return f"was killed{killed}" if killed else "has ended (its launcher knows the exit code)"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a signal without a name
        name = f"signal {-code}"
    # the OOM killer sends the same SIGKILL as a person: only the counter of the group tells them apart
    return f"was killed by {name}{killed if code == -signal.SIGKILL else ''}"
