"""What the ranks of a run know of each other when it does not move, or when one of them has died.

A rank asks all by a number in the store. Each answers with its place; for one that cannot, because it is
stopped or its lock of Python is held, the ranks of its node answer. The lowest rank that has answered prints.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from bootfile.ground import errors
from bootfile.ground.errors import print_line
from bootfile.processes import memory_files, ranks, signals, stacks
from bootfile.processes.board import Board
from bootfile.processes.ends import MemoryKills, Process, describe
from bootfile.processes.stacks import Place

if TYPE_CHECKING:
    from bootfile.processes.stuck import Watch

_LONGEST_WAIT = 10.0  # seconds for the answers of all ranks
_SHORTEST_WAIT = 1.0
_LAST_WAIT = 0.15  # of the time limit of a collective: it may end the run before the line
_TURN = 1.5  # seconds that the next rank waits for the one before it to print
_MOST_TURNS = 5
_LOSS = 3.0  # seconds in which a rank that has lost contact waits for the reason
_CALM = 1.0  # seconds before an end is told that may be one of all ranks
_MOST_DUMP = 2**17  # bytes of the stacks of another rank
_SILENT = Place("silent", "")
_PAUSED = Place(stacks.IN, "a debugger")
_DONE = "done"  # what a rank says that has left the training
_SECONDARY = {errors.LOST_CONTACT, errors.NO_RENDEZVOUS}  # exit codes of a rank that has lost another one
_PARENT = "BOOTFILE_STARTED_BY"  # it is our launcher, which tells why a process has ended


def meet(tells_ends: bool) -> "Peers":
    """Return the Peers of this rank. Call it on every rank: they exchange what they know of themselves."""
    machine = socket.gethostname()
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        machine = file.read() + os.readlink("/proc/self/ns/pid")
    count = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks.world_size())
    facts = {
        "host": socket.gethostname(),
        "node": ranks.rank() // count,
        "machine": machine,
        "pid": os.getpid(),
        "dump": memory_files.make("stacks"),
        "mail": memory_files.make("place"),
        "name": secrets.token_hex(8),
    }
    return Peers(ranks.gather_objects(facts), tells_ends)


class Peers:
    """The ranks of a run, as the thread of a Watch knows them. facts: of each rank, see meet()."""

    def __init__(self, facts: list[dict[str, Any]], tells_ends: bool):
        self.facts = facts
        self.rank = ranks.rank()
        store = ranks.store()
        assert store is not None  # there are several ranks
        self._board = Board(store, f"bootfile peers {facts[0]['name']}")
        self._tells_ends = tells_ends
        self._kills = MemoryKills()
        self._has_left = False
        self._mine = facts[self.rank]
        self._local: dict[int, Process] = {}  # the other ranks of this node
        for rank, other in enumerate(facts):
            if rank != self.rank and other["machine"] == self._mine["machine"]:
                self._local[rank] = Process(other["pid"])
        self._reader, self._writer = os.pipe()  # readable when the run has ended
        self._poll = select.poll()
        self._poll.register(self._reader, select.POLLIN)
        for process in self._local.values():
            if process.descriptor is not None:
                self._poll.register(process.descriptor, select.POLLIN)
        self._ended: dict[int, float] = {}  # ranks of this node that have ended, and since when it is known
        self._texts: dict[int, str] = {}  # their reasons
        self._early = set[int]()  # those that ended by themselves, and have not left the training
        self._lock = threading.Lock()  # the main thread tells an end before it gives up
        self._told = False
        self._is_here = False  # this rank has answered a roll call
        self._first_at: float | None = None  # since when the first end is known here
        self._cycle = 0  # the number of the last question
        self._is_open = False  # it has no line yet
        self._asked_at = 0.0
        self._moved_at = 0.0  # Watch.at when this rank answered
        self._silent_since: float | None = None

    def list_node(self) -> list[list[int]]:
        """Return [rank, process id, descriptor of its stacks] of the ranks of this node."""
        members = sorted([*self._local, self.rank])
        return [[rank, self.facts[rank]["pid"], self.facts[rank]["dump"]] for rank in members]

    def sleep(self, seconds: float) -> None:
        """Wait, at most until a rank of this node ends or the run does."""
        for descriptor, _ in self._poll.poll(seconds * 1000):
            self._poll.unregister(descriptor)

    def look(self, watch: "Watch", now: float, is_due: bool) -> None:
        """Answer the others, ask them if the run does not move, and tell the end of a rank. The thread of
        the Watch calls it in each of its rounds."""
        if self._tells_ends:
            with self._lock:
                self._note_ends(now)
        answer = self._board.read("first end", "roll call")
        cycle = self._board.count("cycle")
        if answer is None or cycle is None:
            self._look_alone(watch, now, is_due)
            return
        self._silent_since = None
        if self._tells_ends and answer[0]:
            with self._lock:
                self._tell(int(answer[0]), now)
        if answer[1] and not self._is_here:
            self._is_here = True
            self._board.write(f"here/{self.rank}", "here")
        mine = str(self.rank)
        asks = is_due and not self._is_open and cycle == self._cycle
        # the number only grows, and one rank raises it: others may have asked meanwhile
        if asks and self._board.write_first(f"cycle/{cycle + 1}", mine) == mine:
            cycle = self._board.count("cycle", 1) or cycle
        if cycle != self._cycle:
            self._cycle = cycle
            self._is_open = True
            self._asked_at = now
            self._answer(watch, now)
        if self._is_open:
            self._answer_for_others(watch, now)
            if now - self._asked_at > self._patience(watch):
                self._close_cycle(watch, now)

    def _patience(self, watch: "Watch") -> float:
        """Return the seconds for the answers of all: a rank whose lock is held answers by a timer."""
        return min(_LONGEST_WAIT, max(_SHORTEST_WAIT, watch.limit() / 3))

    def _find_deadline(self, watch: "Watch") -> float:
        """Return the seconds after which a rank that has not answered is silent. The timers of two ranks
        differ: each has measured its own steps."""
        longest = _LONGEST_WAIT
        if watch.timeout:
            longest = min(longest, _LAST_WAIT * watch.timeout)
        return max(longest, self._patience(watch))

    def _answer(self, watch: "Watch", now: float) -> dict[str, Any]:
        """Say where this rank is, in the store and to the ranks of this node."""
        state = watch.describe(now) | {"cycle": self._cycle, "at": now}
        self._moved_at = watch.at
        text = json.dumps(state)
        memory_files.replace(self._mine["mail"], text)
        self._board.write(f"state/{self.rank}", text)
        if not state["moves"]:
            watch.write_stacks(self.rank, state["idle"])
        return state

    def _answer_for_others(self, watch: "Watch", now: float) -> None:
        """Say where the ranks of this node are that cannot do it themselves."""
        for rank in self._local:
            if self._read_mail(rank).get("cycle") == self._cycle:
                continue
            place = self._look_at(rank)
            if place is None:
                continue
            state = {"verb": place.verb, "name": place.name, "moves": place == _PAUSED, "cycle": self._cycle}
            self._board.write(f"seen/{rank}", json.dumps(state))
            if place.verb == "held":
                watch.write_stacks(rank, now - watch.at, self._read_file(rank, "dump"))

    def _close_cycle(self, watch: "Watch", now: float) -> None:
        """Print the line, if it is the turn of this rank, or note that another one has."""
        claim = f"claim/{self._cycle}"
        answers = self._board.read(claim)
        if answers is None:
            return
        claimed = answers[0]
        if not claimed:
            turn = min(self.rank, _MOST_TURNS) * _TURN
            waited = now - self._asked_at - turn
            if waited < self._patience(watch):
                return
            claimed = self._report(watch, claim, waited > self._find_deadline(watch))
            if not claimed:  # the store does not answer, or a rank may still do
                return
        self._is_open = False
        idle = now - max(watch.at, watch.floor)
        if claimed.endswith("moves"):
            watch.postpone(idle)
        else:
            watch.close_report(idle)

    def _report(self, watch: "Watch", claim: str, is_last: bool) -> str:
        """Print the line, unless a rank still moves or another one is faster. Return what the ranks then
        find at `claim`; "" to try it again. is_last: ranks that have not answered are silent."""
        count = len(self.facts)
        keys = [f"{name}/{rank}" for name in ("state", "seen", "left") for rank in range(count)]
        texts = self._board.read(*keys)
        if texts is None:
            return ""
        states = [json.loads(text or "{}") for text in texts[: 2 * count]]
        answers = [state for state in states if state.get("cycle") == self._cycle]
        longest = max([state.get("idle", 0.0) for state in answers], default=0.0)
        moves = any(state["moves"] for state in answers) and not watch.is_last_chance(longest)
        # the answers are some seconds old: a step may have ended since
        moves = moves or watch.at > self._moved_at
        places = {}
        for rank in range(count):
            has_left = texts[2 * count + rank] == _DONE
            places[rank] = self._choose(rank, states[rank], states[count + rank], has_left)
        if not moves and not is_last and _SILENT in places.values():
            return ""
        text = f"{self.rank} {'moves' if moves else 'stuck'}"
        claimed = self._board.write_first(claim, text) or ""
        if claimed == text and not moves:
            watch.report(longest, places, self.name)
        return claimed

    def _choose(self, rank: int, state: dict[str, Any], seen: dict[str, Any], has_left: bool) -> Place:
        """Return where a rank is, from its answer, or from that of a rank of its node."""
        for answer in (state, seen):
            if answer.get("cycle") == self._cycle:
                return Place(answer["verb"], answer["name"])
        if has_left:  # its loop has ended: it may evaluate, or wait for the others
            return Place("ended", "its loop")
        if rank in self._local:
            return self._look_at(rank) or _SILENT
        return _SILENT

    def _look_alone(self, watch: "Watch", now: float, is_due: bool) -> None:
        """Print the line of this node if the store does not answer: its process is stopped or cut off."""
        if self._silent_since is None:
            self._silent_since = now
        if self._board.lost and self._tells_ends:
            with self._lock:
                self._tell_local(now)
        if not is_due:
            return
        mine = self._answer_locally(watch, now)
        waited = now - self._silent_since
        if waited < self._patience(watch):
            return
        places = {}
        present = [self.rank]
        for rank in range(len(self.facts)):
            places[rank] = _SILENT
            mail = self._read_mail(rank) if rank in self._local else {}
            if now - mail.get("at", 0) < 2 * self._patience(watch):
                present.append(rank)
                places[rank] = Place(mail["verb"], mail["name"])
            elif rank in self._local:
                places[rank] = self._look_at(rank) or _SILENT
                if places[rank] == _SILENT and waited < self._find_deadline(watch):
                    return
        places[self.rank] = Place(mine["verb"], mine["name"])
        if mine["moves"]:
            watch.postpone(mine["idle"])
            return
        if self.rank == min(present):
            watch.report(mine["idle"], places, self.name)
        watch.close_report(mine["idle"])

    def _answer_locally(self, watch: "Watch", now: float) -> dict[str, Any]:
        """Say where this rank is to the ranks of this node only."""
        state = watch.describe(now) | {"cycle": -1, "at": now}
        memory_files.replace(self._mine["mail"], json.dumps(state))
        watch.write_stacks(self.rank, state["idle"])
        return state

    def _look_at(self, rank: int) -> Place | None:
        """Return what this node sees of a rank that does not answer; None if it sees nothing."""
        process = self._local[rank]
        if process.has_ended():
            return Place("ended", "")
        if process.is_stopped():
            return Place("stopped", "")
        dump = self._read_file(rank, "dump")
        if dump:
            stack = stacks.parse(dump)
            if stacks.is_at_rest(stack):  # debugpy stops all threads
                return _PAUSED
            return Place("held", f"{stacks.find_place(stack).name}, in C code that holds Python's lock")
        return None

    def _read_mail(self, rank: int) -> dict[str, Any]:
        with contextlib.suppress(ValueError):  # it is being written
            mail: dict[str, Any] = json.loads(self._read_file(rank, "mail") or "{}")
            return mail
        return {}

    def _read_file(self, rank: int, name: str) -> str:
        """Return the content of a file in the memory of a rank of this node; "" without one."""
        facts = self.facts[rank]
        with contextlib.suppress(OSError), open(f"/proc/{facts['pid']}/fd/{facts[name]}", "rb") as file:
            return file.read(_MOST_DUMP).decode(errors="replace")
        return ""

    def note_pause(self, seconds: float | None) -> None:
        """Write how many seconds this rank was stopped; None deletes the note."""
        self._board.write(f"pause/{self.rank}", "" if seconds is None else f"{seconds:.0f}")

    def all_paused(self) -> bool:
        """Return whether all ranks have noted a pause; False as well if the store does not answer."""
        answers = self._board.read(*(f"pause/{rank}" for rank in range(len(self.facts))))
        return answers is not None and all(answers)

    def name(self, members: list[int]) -> str:
        """Return "rank 3 on node b" or "ranks 0-2, 4". The node is named if there are several, and all
        members are on one of them."""
        runs: list[list[int]] = []
        for rank in sorted(members):
            if runs and rank == runs[-1][-1] + 1:
                runs[-1].append(rank)
            else:
                runs.append([rank])
        spans = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
        label = f"rank{'s' if len(members) > 1 else ''} {', '.join(spans)}"
        names = {self._node(rank) for rank in members}
        several = len({self._node(rank) for rank in range(len(self.facts))}) > 1
        return f"{label} on node {names.pop()}" if several and len(names) == 1 else label

    def _node(self, rank: int) -> str:
        """Return the name of the host of a rank, or the number of its node if all hosts have one name."""
        hosts = {facts["host"] for facts in self.facts}
        return str(self.facts[rank]["host"] if len(hosts) > 1 else self.facts[rank]["node"])

    # The end of a rank.

    def _note_ends(self, now: float) -> None:
        """Write to the store which ranks of this node have ended, and why."""
        for rank, process in self._local.items():
            if rank in self._texts or not process.has_ended():
                continue
            since = self._ended.setdefault(rank, now)
            status = process.read_status()
            code = None if status is None else os.waitstatus_to_exitcode(status)
            is_certain = code is not None and code != -signal.SIGABRT and (code < 0 or code == 1)
            if code in _SECONDARY or (signals.asked() and code != -signal.SIGKILL):
                self._texts[rank] = ""
                continue
            if not is_certain and now - since < _CALM and not self._kills.explain():
                continue
            left, early = self._board.read(f"left/{rank}", f"early/{rank}") or ["", ""]
            if left:
                self._texts[rank] = ""
                continue
            text = f"{self._describe_rank(rank)} {describe(status, self._kills)}"
            if early and code == -signal.SIGABRT:  # the teardown of a process whose threads of gloo still run
                code = 0
                text = early
            self._texts[rank] = text
            self._board.write_first(f"end/{rank}", text)
            if code == 0:  # this rank may be about to end, too
                self._early.add(rank)
            self._board.write_first("early end" if code == 0 else "first end", str(rank))

    def _describe_rank(self, rank: int) -> str:
        return f"{self.name([rank])} (pid {self.facts[rank]['pid']})"

    def _tell(self, rank: int, now: float, is_early: bool = False) -> None:
        """Print why a rank has ended: on rank 0, or on another one if that does not do it. is_early: its exit
        code may be 0, of which no launcher tells."""
        if self._told or rank == self.rank:
            return
        if self._first_at is None:
            self._first_at = now
        is_first = self.rank == 0 or rank == 0
        if not is_first and now - self._first_at < _LOSS:
            return
        self._told = True
        if not is_early and _PARENT in os.environ and self.facts[rank]["node"] == self._mine["node"]:
            return
        mine = str(self.rank)
        if self._board.write_first(f"told/{rank}", mine) == mine:
            answer = self._board.read(f"end/{rank}", f"early/{rank}")
            text = self._texts.get(rank, "")
            if answer:
                text = answer[0] or answer[1]
            print_line(text)

    def _tell_local(self, now: float, is_last: bool = False) -> None:
        """Print why a rank has ended if the store has ended with it: on the lowest rank of each node.
        is_last: this rank has lost contact, and ends."""
        if self._told:
            return
        others = [rank for rank, process in self._local.items() if not process.has_ended()]
        if self.rank > min([*others, self.rank]) or _PARENT in os.environ:
            return
        for rank, text in self._texts.items():
            if text and (is_last or rank not in self._early):
                self._told = True
                print_line(text)
                return
        if 0 not in self._local and now - (self._silent_since or now) > _CALM:
            self._told = True
            holder = self._describe_rank(0)
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                holder = "the launcher of the first node, which holds the store,"
            print_line(f"{holder} has ended, or cannot be reached: {self._board.lost}")

    def announce_loss(self) -> None:
        """Tell the others that this rank has lost contact with one of them, and ends itself."""
        self._board.write(f"left/{self.rank}", "lost contact")

    def has_lost_first(self) -> bool:
        """Return whether rank 0 has ended or cannot be reached, after announce_loss(). The main thread calls
        it: it waits for some seconds at most, and only as long as nothing is known of rank 0."""
        deadline = time.monotonic() + _LOSS
        while True:
            if 0 in self._local and self._local[0].has_ended():
                return True
            answer = self._board.read("left/0", "end/0")
            if answer is None and self._board.lost:  # rank 0, or its launcher, has held the store
                return True
            if answer and answer[0]:  # it lives, and has lost another rank itself
                return False
            if answer and answer[1]:  # a rank of its node has seen its end
                return True
            if time.monotonic() > deadline:
                # on another node that is silent: a rank that lives loses contact as well, and says so
                return 0 not in self._local
            time.sleep(0.05)

    def explain_loss(self) -> None:
        """Wait for the reason why this rank has lost contact with another one, and tell it. The main thread
        calls it before this rank ends."""
        if not self._tells_ends:
            return
        self._board.write_first("roll call", str(self.rank))  # the threads of all ranks answer it
        deadline = time.monotonic() + _LOSS
        while not self._told and time.monotonic() < deadline:
            now = time.monotonic()
            answer = self._board.read("first end", "early end")
            with self._lock:
                self._note_ends(now)
                if answer and answer[0]:
                    self._tell(int(answer[0]), now)
                    return
                # its exit code may become known until the wait ends
                if answer and answer[1] and now > deadline - _LOSS / 2:
                    self._tell(int(answer[1]), now, is_early=True)
                    return
                if answer is None:
                    self._silent_since = self._silent_since or now
                    self._tell_local(now, is_last=True)
            time.sleep(0.05)
        if not self._told:
            self._tell_silent()

    def _tell_silent(self) -> None:
        """Print which ranks do not answer, if no process of their nodes has told why."""
        others = [rank for rank in range(len(self.facts)) if rank != self.rank and rank not in self._local]
        texts = self._board.read(*(f"{name}/{rank}" for rank in others for name in ("here", "left")))
        if texts is None:
            return
        silent = []
        for rank, here, left in zip(others, texts[::2], texts[1::2], strict=True):
            if not here and not left:
                silent.append(rank)
        mine = str(self.rank)
        if silent and self._board.write_first("told/silent", mine) == mine:
            verb = "have" if len(silent) > 1 else "has"
            print_line(f"{self.name(silent)} {verb} ended, or cannot be reached: see the launcher's log")

    def announce_end(self, reason: str) -> None:
        """Tell the others that this rank ends with an error."""
        self._board.write_first(f"end/{self.rank}", f"{self._describe_rank(self.rank)} ended with {reason}")
        self._board.write_first("first end", str(self.rank))

    def kill_others(self) -> None:
        """End the ranks of this node that cannot end themselves: the run ends because it is stuck."""
        for rank, process in self._local.items():
            place = self._look_at(rank)
            if place and place.verb in ("stopped", "held"):
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)

    def wake(self) -> None:
        """End sleep(): the run has ended."""
        if not self._has_left:
            os.write(self._writer, b"\0")

    def leave(self, is_early: bool) -> None:
        """End the threads that use the store. is_early: the process ends by sys.exit(), or with its script,
        and the run may not have ended: if others then lose contact, this is the reason."""
        if self._has_left:
            return
        self._has_left = True
        if is_early:
            text = f"{self._describe_rank(self.rank)} ended by itself, before the others"
            self._board.write(f"early/{self.rank}", text)
            self._board.write_first("early end", str(self.rank))
        else:
            self._board.write(f"left/{self.rank}", _DONE)
        self._board.close()
        for descriptor in (self._mine["mail"], self._mine["dump"], self._reader, self._writer):
            os.close(descriptor)
        for process in self._local.values():
            process.close()
