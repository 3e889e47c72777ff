"""Why a rank of a run has died: the first reason that is in the store counts, and one rank prints it.

A rank that ends with an error, or by itself, writes its reason; for one that is killed, the ranks of its node
do. Our own launcher prints the ends of the processes that it has started.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping

from bootfile.ground import errors
from bootfile.ground.errors import print_line
from bootfile.processes import signals
from bootfile.processes.board import Board
from bootfile.processes.ends import MemoryKills, Process, describe

_LOSS = 3.0  # seconds in which a rank that has lost contact waits for the reason
_CALM = 1.0  # seconds before an end is told that may be one of all ranks
_SECONDARY = {errors.LOST_CONTACT, errors.NO_RENDEZVOUS}  # exit codes of a rank that has lost another one
_PARENT = "BOOTFILE_STARTED_BY"  # it is our launcher, which tells why a process has ended
# keys of the store: "RANK TEXT" of the first rank that has ended, and of the first that may just be finished
_FIRST = "first end"
_EARLY = "early end"


class RankEnds:
    """What this rank knows of the ends of all ranks.

    local: the processes of the other ranks of this machine.
    node: the ranks of this node.
    name: returns the words for a rank, with its process id.
    """

    def __init__(
        self,
        rank: int,
        local: Mapping[int, Process],
        node: tuple[int, ...],
        board: Board,
        name: Callable[[int], str],
    ):
        self._rank = rank
        self._local = local
        self._node = node
        self._board = board
        self._name = name
        self._kills = MemoryKills()
        self._ended: dict[int, float] = {}  # rank of this machine -> when this rank has noticed its end
        self._early = set[int]()  # the ranks of this machine that have ended with the exit code 0
        self._texts: dict[int, str] = {}  # rank of this machine -> why it has ended; "": because of another
        self._first_at: float | None = None  # when this rank has read the first end
        self._lost_at: float | None = None  # when this rank has noticed that the store is lost
        self._told = False  # this rank has printed the first end, or has found that another one prints it
        self._lock = threading.Lock()  # the watching thread and the main thread call look()

    def look(self, now: float, gives_up: bool = False) -> bool:
        """Note the ends of the ranks of this machine, and print the first end of all ranks. Return whether
        there is one.

        gives_up: this rank has lost contact, and ends. Then a rank that has ended with the exit code 0 may be
        the reason, if there is no other.
        """
        with self._lock:
            for rank, process in self._local.items():
                if rank not in self._texts and process.has_ended():
                    self._note(rank, process, now)
            answer = self._board.read(_FIRST, _EARLY)
            if answer is None:
                if self._board.lost and not self._told:
                    self._tell_alone(now, gives_up)
                return self._told
            first, early = answer
            end = first
            if gives_up and not first:
                end = early
            if end and not self._told:
                number, _, text = end.partition(" ")
                self._tell(int(number), text, now, is_early=not first)
            return bool(end)

    def _note(self, rank: int, process: Process, now: float) -> None:
        """Write why a rank of this machine has ended, as soon as it is certain."""
        since = self._ended.setdefault(rank, now)
        status = process.read_status()
        code = None if status is None else os.waitstatus_to_exitcode(status)
        is_secondary = code in _SECONDARY
        was_asked = signals.asked() and code != -signal.SIGKILL
        is_certain = is_secondary or was_asked or self._is_failure(code)
        if not is_certain and now - since < _CALM:
            return
        answer = self._board.read(f"left/{rank}", _EARLY)
        if answer is None and not self._board.lost:
            return  # it is not known whether the rank has left: the next look asks again
        left, early = answer or ["", ""]
        if left or is_secondary or was_asked:
            self._texts[rank] = ""
            return
        text = f"{rank} {self._name(rank)} {describe(status, self._kills)}"
        # the teardown of a process whose threads of gloo still run ends with SIGABRT
        if early.startswith(f"{rank} ") and code == -signal.SIGABRT:
            code, text = 0, early
        self._texts[rank] = text
        if code == 0:  # this rank may be about to end, too
            self._early.add(rank)
        self._board.write_first(_EARLY if code == 0 else _FIRST, text)

    def _is_failure(self, code: int | None) -> bool:
        """Return whether a process has surely failed: with exit code 1, by a signal or by the OOM killer.
        SIGABRT is not sure: it may come from the teardown of a process that has ended well."""
        if code == 1 or (code is not None and code < 0 and code != -signal.SIGABRT):
            return True
        return bool(self._kills.explain())

    def _tell(self, rank: int, text: str, now: float, is_early: bool) -> None:
        """Print why a rank has ended. Rank 0 prints it; another rank does if rank 0 itself has ended, or has
        not printed it in time."""
        self._first_at = self._first_at or now
        is_in_turn = self._rank == 0 or rank == 0 or now - self._first_at >= _LOSS
        if rank == self._rank or not is_in_turn:
            return
        self._told = True
        # our launcher prints the ends of the processes of its node, except for exit code 0
        if _PARENT in os.environ and rank in self._node and not is_early:
            return
        # the first rank that writes its number prints the line
        mine = str(self._rank)
        if self._board.write_first("told", mine) == mine:
            print_line(text)

    def _tell_alone(self, now: float, gives_up: bool) -> None:
        """Print why a rank has ended if the store has ended, too. The lowest rank of each machine does it."""
        self._lost_at = self._lost_at or now
        alive = [rank for rank, process in self._local.items() if not process.has_ended()]
        if self._rank > min([*alive, self._rank]) or _PARENT in os.environ:
            return
        reasons = []
        for rank, reason in self._texts.items():
            if reason and (gives_up or rank not in self._early):
                reasons.append(reason)
        if reasons:
            text = reasons[0].partition(" ")[2]
        elif 0 not in self._local and now - self._lost_at > _CALM:
            holder = self._name(0)
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                holder = "the launcher of the first node, which holds the store,"
            text = f"{holder} has ended, or cannot be reached: {self._board.lost}"
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
        mine = str(self._rank)
        if silent and self._board.write_first("told", mine) == mine:
            verb = "have" if len(silent) > 1 else "has"
            print_line(f"{name(silent)} {verb} ended, or cannot be reached: see the launcher's log")

    def announce(self, reason: str) -> None:
        """Tell the others that this rank ends with an error."""
        self._board.write_first(_FIRST, f"{self._rank} {self._name(self._rank)} ended with {reason}")

    def announce_early(self) -> None:
        """Tell the others that this process ends by sys.exit() or at the end of its script. If they lose
        contact, this is the reason: for them the run has not ended."""
        text = f"{self._name(self._rank)} ended by itself, before the others"
        self._board.write_first(_EARLY, f"{self._rank} {text}")

    def announce_loss(self) -> None:
        """Tell the others that this rank has lost contact with one of them, and ends itself."""
        self._board.write(f"left/{self._rank}", "lost contact")

    def has_lost_first(self) -> bool:
        """Return whether rank 0 has ended or cannot be reached. The main thread calls it after
        announce_loss(). It waits for some seconds at most, until something is known of rank 0."""
        deadline = time.monotonic() + _LOSS
        while time.monotonic() < deadline:
            if 0 in self._local and self._local[0].has_ended():
                return True
            answer = self._board.read("left/0", _FIRST)
            if answer is None and self._board.lost:  # rank 0, or its launcher, has held the store
                return True
            left, first = answer or ["", ""]
            if left:  # it lives, and has lost another rank itself
                return False
            if first.startswith("0 "):  # a rank of its node has seen its end
                return True
            time.sleep(0.05)
        # on another node that is silent: a rank that lives loses contact as well, and says so
        return 0 not in self._local
