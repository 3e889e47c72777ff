"""Why a process has ended: its exit code or signal, and whether the kernel's OOM killer has ended it."""

import contextlib
import fcntl
import os
import signal
import struct

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
    on. Without a group they are those of the machine.

    proc, groups: where the kernel shows them.
    """

    def __init__(self, proc: str = "/proc", groups: str = "/sys/fs/cgroup"):
        self._file = ""  # has a line "oom_kill N"
        self._limit = _UNLIMITED  # bytes
        self._where = "container"
        self._find_group(proc, groups)
        # no group is visible: the counter of the whole machine, which may count processes of others
        if not self._file:
            self._file = os.path.join(proc, "vmstat")
            self._where = "machine"
        self._before = self._count()

    def explain(self) -> str:
        """Return ": the kernel's OOM killer ended a process of this container (memory limit 2.0 GB)", or ""
        if it has ended none since the object was made."""
        count = self._count()
        if count is None or self._before is None or count <= self._before:
            return ""
        limit = f" (memory limit {self._limit / 2**30:.1f} GB)" if self._limit < _UNLIMITED else ""
        return f": {_OOM} {self._where}{limit}"

    def _count(self) -> int | None:
        with contextlib.suppress(OSError), open(self._file) as file:
            for line in file:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return None

    def _find_group(self, proc: str, groups: str) -> None:
        """Find the files of this process's group: of version 2, or of the memory controller of version 1."""
        lines = []
        with contextlib.suppress(OSError), open(os.path.join(proc, "self", "cgroup")) as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
        for _, controllers, path in lines:
            if controllers == "":  # version 2
                controller, counter, limit = "", "memory.events", "memory.max"
            elif "memory" in controllers.split(","):
                controller, counter, limit = "memory", "memory.oom_control", "memory.limit_in_bytes"
            else:
                continue
            top = os.path.join(groups, controller)
            # in a container the mount begins at the group, and the path may be that of the host
            for folder in (os.path.join(top, path.strip("/")), top):
                file_of_counter = os.path.join(folder, counter)
                if not self._file and os.path.exists(file_of_counter):
                    self._file = file_of_counter
                    self._limit = _read_limit(folder, top, limit)


def _read_limit(folder: str, top: str, name: str) -> int:
    """Return the smallest limit of a group and of those that contain it, in bytes."""
    limit = _UNLIMITED
    while folder.startswith(top.rstrip("/")):
        with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, name)) as file:
            limit = min(limit, int(file.read()))  # it may be "max"
        folder = os.path.dirname(folder.rstrip("/"))
    return limit


def describe(status: int | None, kills: MemoryKills) -> str:
    """Return how a process has ended: "was killed by SIGKILL: ...", "ended with exit code 1".

    status: as os.waitpid() returns it, None if it is not known. kills: made before the process ended.
    """
    if status is None:
        killed = kills.explain()
        return f"was killed{killed}" if killed else "has ended (its launcher knows the exit code)"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a signal without a name
        name = f"signal {-code}"
    # the OOM killer sends the same SIGKILL as a person: only the counter of the group tells them apart
    reason = kills.explain() if code == -signal.SIGKILL else ""
    return f"was killed by {name}{reason}"
