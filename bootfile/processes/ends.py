"""Why a process has ended: its exit code or signal, and whether the kernel's OOM killer has ended it.

Of the ranks of a run, the first reason that is in the store counts, and one rank prints it. A rank that ends
with an error, or by itself, writes its reason; for one that is killed, the ranks of its node do. Our own
launcher prints the ends of the processes that it has started.
"""

import contextlib
import dataclasses
import fcntl
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bootfile.ground import errors
from bootfile.ground.errors import print_line
from bootfile.ground.exit_codes import name_signal
from bootfile.machine.control_groups import find_folders, read_number, read_text
from bootfile.processes import signals

if TYPE_CHECKING:  # it needs torch, which the process of node.py has not
    from bootfile.processes.board import Board

# PIDFD_GET_INFO of <linux/pidfd.h>, since Linux 6.15 also for a process whose parent has read its exit code
_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
_HAS_EXIT = 8  # bit of the mask: exit_code is known
ENDED = ("Z", "X", "x")  # states of /proc/PID/stat: zombie, dead
_UNLIMITED = 2**60  # bytes: a limit above is none
_OOM = "the kernel's OOM killer ended a process of this"
_CONTACT = re.compile(
    r"^Dist\w*Error|\b(gloo|nccl|socket|broken pipe|pair closure)\b|connection (closed|reset|refused)"
    r"|timed out waiting",
    re.IGNORECASE,
)
_LOSS = 3.0  # seconds in which a rank that has lost contact waits for the reason
_CALM = 1.0  # seconds before an end is told that may be one of all ranks
_SECONDARY = {errors.LOST_CONTACT, errors.NO_RENDEZVOUS}  # exit codes of a rank that has lost another one
_PARENT = "BOOTFILE_STARTED_BY"  # it is our launcher, which tells why a process has ended
# keys of the store: "RANK TEXT" of the first rank that has ended, and of the first that may just be finished
_FIRST = "first end"
_EARLY = "early end"


class Process:
    """A process of this node whose end is watched; usually not a child of this one.

    pid: the id of a process that runs now.
    """

    def __init__(self, pid: int):
        self.pid = pid
        self.descriptor: int | None = None  # readable when the process has ended
        # the system gives an id out again: the time of the start tells whether it is the same process
        self._started = read_stat(pid)[2]
        with contextlib.suppress(OSError, AttributeError):  # AttributeError: not Linux
            self.descriptor = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Return whether the process has ended. A process that only stopped has not."""
        state, _, started = read_stat(self.pid)
        return state in ENDED or started != self._started

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
        state, _, started = read_stat(self.pid)
        if state in ENDED and started == self._started:
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
    return read_stat(pid)[0] in ("t", "T")


def start_of(pid: int) -> str:
    """Return when a process of this node started, which tells it from a later one with the same id. Return ""
    if it has ended, and without /proc."""
    state, _, started = read_stat(pid)
    return "" if state in ENDED else started


def read_stat(pid: int) -> tuple[str, str, str]:
    """Return (state, id of the parent, time of its start) of a process; (ENDED[1], "", "") without one, and
    without /proc."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # the name of the program comes before it in brackets, and may have any character in it
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ENDED[1], "", ""
    return fields[0], fields[1], fields[19]


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
    name = name_signal(-code)
    # the OOM killer sends the same SIGKILL as a person: only the counter of the group tells them apart
    return f"was killed by {name}{killed if code == -signal.SIGKILL else ''}"


def has_lost_contact(error: BaseException) -> bool:
    """Return whether an error says that another process cannot be reached."""
    first_line = next(iter(str(error).splitlines()), "")
    text = f"{type(error).__name__} {first_line}"
    return isinstance(error, RuntimeError) and bool(_CONTACT.search(text))


@dataclasses.dataclass
class RankEnds:
    """What this rank knows of the ends of all ranks."""

    rank: int
    local: Mapping[int, Process]  # the other ranks of this machine
    node: tuple[int, ...]  # the ranks of this node
    board: "Board"
    name: Callable[[int], str]  # returns the words for a rank, with its process id
    _first_at: float = 0.0  # when this rank has read the first end, or has found that the store is lost
    _told: bool = False  # this rank has printed the first end, or has found that another one prints it
    _kills: MemoryKills = dataclasses.field(default_factory=MemoryKills)
    _ended: dict[int, float] = dataclasses.field(default_factory=dict)  # rank -> when its end was noticed
    _early: set[int] = dataclasses.field(default_factory=set)  # ranks that have ended with the exit code 0
    _texts: dict[int, str] = dataclasses.field(default_factory=dict)  # rank -> why; "": because of another
    # the watching thread and the main thread call look()
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def look(self, now: float, gives_up: bool = False) -> bool:
        """Note the ends of the ranks of this machine, and print the first end of all ranks. Return whether
        there is one.

        gives_up: this rank has lost contact, and ends. Then a rank that has ended with the exit code 0 may be
        the reason, if there is no other.
        """
        with self._lock:
            for rank, process in self.local.items():
                if rank not in self._texts and process.has_ended():
                    self._note(rank, process, now)
            answer = self.board.read(_FIRST, _EARLY)
            if answer is None and self.board.lost and not self._told:
                self._tell_alone(now, gives_up)
            if answer is None or self._told:
                return self._told
            first, early = answer
            if end := first or (early if gives_up else ""):
                self._tell(end, now, is_early=not first)
            return bool(end)

    def _note(self, rank: int, process: Process, now: float) -> None:
        """Write why a rank of this machine has ended, as soon as it is certain."""
        since = self._ended.setdefault(rank, now)
        status = process.read_status()
        code = None if status is None else os.waitstatus_to_exitcode(status)
        was_asked = signals.asked() and code != -signal.SIGKILL
        is_of_another = code in _SECONDARY or was_asked
        # SIGABRT is not certain: the teardown of a process that has ended well may end with it
        has_failed = code == 1 or (code is not None and code < 0 and code != -signal.SIGABRT)
        is_certain = is_of_another or has_failed or self._kills.explain()
        if not is_certain and now - since < _CALM:
            return
        answer = self.board.read(f"left/{rank}", _EARLY)
        if answer is None and not self.board.lost:
            return  # it is not known whether the rank has left: the next look asks again
        left, early = answer or ["", ""]
        if left or is_of_another:
            self._texts[rank] = ""
            return
        text = f"{rank} {self.name(rank)} {describe(status, self._kills)}"
        # the teardown of a process whose threads of gloo still run ends with SIGABRT
        if early.startswith(f"{rank} ") and code == -signal.SIGABRT:
            code, text = 0, early
        self._texts[rank] = text
        if code == 0:  # this rank may be about to end, too
            self._early.add(rank)
        self.board.write_first(_EARLY if code == 0 else _FIRST, text)

    def _tell(self, end: str, now: float, is_early: bool) -> None:
        """Print why a rank has ended. Rank 0 prints it; another rank does if rank 0 itself has ended, or has
        not printed it in time."""
        self._first_at = self._first_at or now
        number, _, text = end.partition(" ")
        rank = int(number)
        is_in_turn = 0 in (self.rank, rank) or now - self._first_at >= _LOSS
        if rank == self.rank or not is_in_turn:
            return
        self._told = True
        # our launcher prints the ends of the processes of its node, except for exit code 0
        if is_early or _PARENT not in os.environ or rank not in self.node:
            self._print_once(text)

    def _print_once(self, text: str) -> None:
        """Print a line unless another rank has: the first one that writes its number does."""
        mine = str(self.rank)
        if self.board.write_first("told", mine) == mine:
            print_line(text)

    def _tell_alone(self, now: float, gives_up: bool) -> None:
        """Print why a rank has ended if the store has ended, too. The lowest rank of each machine does it."""
        self._first_at = self._first_at or now
        alive = [rank for rank, process in self.local.items() if not process.has_ended()]
        if self.rank > min([*alive, self.rank]) or _PARENT in os.environ:
            return
        ends = {rank: text for rank, text in self._texts.items() if gives_up or rank not in self._early}
        if reason := next(filter(None, ends.values()), ""):
            text = reason.partition(" ")[2]
        elif 0 not in self.local and now - self._first_at > _CALM:
            holder = self.name(0)
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                holder = "the launcher of the first node, which holds the store,"
            text = f"{holder} has ended, or cannot be reached: {self.board.lost}"
        else:
            return
        self._told = True
        print_line(text)

    def explain(self) -> bool:
        """Wait for the reason why this rank has lost contact with another one, and print it. Return whether
        there is one. The main thread calls it before this rank ends."""
        deadline = time.monotonic() + _LOSS
        while (now := time.monotonic()) < deadline:
            # the exit code of a rank that has ended by itself may become known until the wait ends
            if self.look(now, gives_up=now > deadline - _LOSS / 2):
                return True
            time.sleep(0.05)
        return self._told

    def tell_silent(self, silent: list[int], name: Callable[[list[int]], str]) -> None:
        """Print which ranks do not answer, if no process of their nodes has told why."""
        if silent:
            verb = "have" if len(silent) > 1 else "has"
            self._print_once(f"{name(silent)} {verb} ended, or cannot be reached: see the launcher's log")

    def announce(self, how: str, is_early: bool = False) -> None:
        """Tell the others how this rank ends: "with ValueError". is_early: by itself, before the others, for
        which the run has not ended. It is the reason only if they lose contact."""
        text = f"{self.rank} {self.name(self.rank)} ended {how}"
        self.board.write_first(_EARLY if is_early else _FIRST, text)

    def announce_loss(self) -> None:
        """Tell the others that this rank has lost contact with one of them, and ends itself."""
        self.board.write(f"left/{self.rank}", "lost contact")

    def has_lost_first(self) -> bool:
        """Return whether rank 0 has ended or cannot be reached. The main thread calls it after
        announce_loss(). It waits for some seconds at most, until something is known of rank 0."""
        deadline = time.monotonic() + _LOSS
        while time.monotonic() < deadline:
            if 0 in self.local and self.local[0].has_ended():
                return True
            answer = self.board.read("left/0", _FIRST)
            if answer is None and self.board.lost:  # rank 0, or its launcher, has held the store
                return True
            left, first = answer or ["", ""]
            # one that has left is alive, and has lost another rank itself; an end is seen by its node
            if left or first.startswith("0 "):
                return not left
            time.sleep(0.05)
        # on another node that is silent: a rank that lives loses contact as well, and says so
        return 0 not in self.local
