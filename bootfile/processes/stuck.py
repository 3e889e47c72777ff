"""Say where each rank is when a run does not move.

    watch = stuck.start(folder, step, after=60)     on each rank, before the first step
    watch.note(step)                                at the end of each step
    stuck.stop()

If no step ends for some time, each rank writes the stacks of its threads to FOLDER/stuck, and one rank prints
a line with the place of each rank (peers.py). That is done by a thread. If the main thread holds the lock of
Python in C code, no thread of Python runs: then a timer of faulthandler, a thread of C, writes the stacks to
a file in memory, which another rank of the node reads, or the process of speaker.py if none can.
"""

import atexit
import collections
import contextlib
import faulthandler
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from bootfile.ground import errors
from bootfile.ground.errors import print_line
from bootfile.processes import memory_files, ranks, speaker, stacks, waits
from bootfile.processes.stacks import IN, Place, Stack

if TYPE_CHECKING:
    from bootfile.processes.peers import Peers

AFTER = 60.0  # seconds without the end of a step
FOLDER = "stuck"
_MEDIANS = 20  # or as many median steps, if that is longer
_STEPS = 64  # whose median it is
_LONGER = 4  # times as long are the first step, a compilation, an evaluation and a save
_SHARE = 0.7  # share of the time limit of a collective after which a line comes
_LAST_SHARE = 0.93  # of that limit: the line is repeated
_LOOKS = 8  # in the time after which a run is stuck
_LONGEST_LOOK = 1.0  # seconds between two looks
_MOST_BYTES = 2**17  # of a file of stacks
_MOST_GROUPS = 12  # of ranks in a line
_MOST_WORKERS = 16  # of a loader whose stacks are written
_WORKER_ANSWER = 1.0  # seconds
_FAREWELL = 2.0  # seconds that the end waits for the thread
_NEWS = 10.0  # seconds after a pause in which the other ranks may note theirs
# free on Linux: it makes a worker of a loader write its stacks. The signals of real time have no other use.
_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 5
_CONTACT = re.compile(
    r"\b(gloo|nccl|socket|store|broken pipe|pair closure)\b|connection (closed|reset|refused)|timed out",
    re.IGNORECASE,
)

_watch: "Watch | None" = None  # of the run that trains in this process
_is_hooked = False
_worker_dump: int | None = None  # the descriptor of the file in memory that workers write to


class Watch:
    """The clock of a run, and the thread that looks at it.

    folder: of the results. step: the steps before the first. after: seconds without the end of a step; 0:
    never. exits: end the process after the line. peers: if there are several ranks.
    """

    def __init__(self, folder: str, step: int, after: float, exits: bool, peers: "Peers | None"):
        self.step = step
        self.at = time.monotonic()  # of the last thing that has moved
        self.line = ""  # the last one that this process has printed
        self.is_ending = False  # the thread ends this process
        self.at_loss: Callable[[], object] | None = None  # called when this rank has lost another one
        self.model: torch.nn.Module | None = None  # in the mode of evaluation while a loop evaluates it
        self._is_longer = True
        self._batches = waits.batches
        self._durations: collections.deque[float] = collections.deque(maxlen=_STEPS)
        self._folder = os.path.join(folder, FOLDER)
        self._after = after
        self._exits = exits
        self._peers = peers
        self._timeout = _find_timeout()
        self._main = threading.get_ident()
        self._is_stopped = threading.Event()
        self.floor = 0.0  # time.monotonic() at which this process continued, if it was stopped itself
        self._pause = 0.0  # seconds for which it was stopped, until that is told
        self._next = 0.0  # seconds without progress after which the next line is due; 0: none was due
        self._armed_at = 0.0
        self._armed_for = 0.0  # the seconds of the timer; 0: it does not run
        self._stuck_since: float | None = None  # `at` of the line; None if the run has moved since
        self._stuck_step = 0
        self._writer: threading.Thread | None = None
        self.dump = peers.facts[peers.rank]["dump"] if peers else memory_files.make("stacks")
        self._thread = threading.Thread(target=self._run, name="stuck", daemon=True)
        self._speaker: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the thread, and the process of speaker.py once on each node."""
        if self._after:
            # the lock may be held before the thread has looked once
            self._arm(time.monotonic(), self.limit())
        if self._after or self._peers:
            self._thread.start()
        if not self._after or sys.platform != "linux":
            return
        members = [[0, os.getpid(), self.dump]]
        names = ["the process"]
        if self._peers:
            members = self._peers.list_node()
            names = [self._peers.name([rank]) for rank, _, _ in members]
        if members[0][1] == os.getpid():
            self._speaker = speaker.start(
                {
                    "parent": os.getpid(),
                    "ranks": members,
                    "names": names,
                    "folder": self._folder,
                    "after": self._after,
                    "exits": self._exits,
                }
            )

    def note(self, step: int, is_longer: bool = False) -> None:
        """Note the end of a step. is_longer: before the next one ends, the run evaluates or saves."""
        now = time.monotonic()
        if not self._is_longer:
            self._durations.append(now - self.at)
        self.at = now
        self.step = step
        self._is_longer = is_longer

    def touch(self) -> None:
        """Note that something else has ended: a save or an evaluation."""
        self.at = time.monotonic()

    def stop(self, is_early: bool) -> None:
        """End the threads: the run has ended, or this process ends with an error. is_early: see Peers."""
        self._is_stopped.set()
        if self._speaker:
            self._speaker.kill()
            self._speaker.wait()
            self._speaker = None
        if self._peers:
            self._peers.wake()
        if self._thread.is_alive():
            self._thread.join(_FAREWELL)
        faulthandler.cancel_dump_traceback_later()
        if self._peers:
            self._peers.leave(is_early)
        else:
            os.close(self.dump)

    @property
    def timeout(self) -> float | None:
        """Return the seconds after which a collective fails; None if it is not known."""
        return self._timeout

    def limit(self) -> float:
        """Return the seconds without progress after which the run is stuck."""
        limit = self._shortest_limit()
        if self._is_longer or not (self.model is None or self.model.training):
            limit *= _LONGER
        if self._timeout:
            limit = min(limit, _SHARE * self._timeout)
        return limit

    def _shortest_limit(self) -> float:
        """Return that of a step without an evaluation and a save."""
        limit = self._after
        if self._durations:
            limit = max(limit, _MEDIANS * statistics.median([*self._durations]))
        return limit

    def _run(self) -> None:
        """Look at the clock until stop(): the thread "stuck"."""
        while not self._is_stopped.is_set():
            pause = _LONGEST_LOOK
            if self._after:
                pause = min(pause, self._shortest_limit() / _LOOKS)
            began = time.monotonic()
            if self._peers:
                self._peers.sleep(pause)
            else:
                self._is_stopped.wait(pause)
            now = time.monotonic()
            if now - began > pause + max(3.0, 3 * pause):  # this process was stopped, or its lock was held
                self.floor = now
                self._note_pause(now - began)
            if not self._is_stopped.is_set():
                self._look(now)

    def _note_pause(self, seconds: float) -> None:
        """Note that no thread of this process ran for some seconds."""
        status = os.fstat(self.dump)
        # C code that held the lock of Python: the timer has written in the pause, long before its end
        was_held = status.st_size > 0 and seconds / 4 < time.time() - status.st_mtime < seconds
        if not 0 < self._after <= seconds or was_held:
            return
        memory_files.replace(self.dump)
        self._pause = seconds
        if self._peers:
            self._peers.note_pause(seconds)

    def _tell_pause(self, now: float) -> None:
        """Print a line if all ranks were stopped at once: none of them could say that the run is stuck."""
        if self._peers is None or (self._peers.rank == 0 and self._peers.all_paused()):
            who = "all ranks were" if self._peers else "the process was"
            text = f"nothing moved for {self._pause:.0f} s at step {self.step + 1}"
            print_line(f"{text}: {who} stopped at once")
            self._pause = 0.0
        elif now - self.floor > _NEWS:
            self._pause = 0.0
            self._peers.note_pause(None)

    def _look(self, now: float) -> None:
        """Do what is due: the thread calls it in each of its rounds."""
        if self._pause:
            self._tell_pause(now)
        if waits.batches != self._batches:  # an evaluation reads batches
            self._batches = waits.batches
            self.at = max(self.at, now)
        idle = now - max(self.at, self.floor)
        if self._stuck_since is not None and self.at > self._stuck_since:
            lost = self.at - self._stuck_since
            print_line(f"the run moves again: {lost:.0f} s were lost at step {self._stuck_step}")
            self._stuck_since = None
        limit = self.limit()
        if idle < limit:
            self._next = 0.0
        if self._after:
            # the lock of Python is not held for so long, also in an evaluation or a save
            self._arm(now, self._shortest_limit() if self._durations else limit)
        is_due = self._after > 0 and idle >= max(limit, self._next)
        if self._peers:
            self._peers.look(self, now, is_due)
        elif is_due:
            state = self.describe(now)
            if state["moves"]:
                self.postpone(idle)
                return
            self.write_stacks(ranks.rank(), idle)
            place = Place(state["verb"], state["name"])
            self.report(idle, {"": place}, ["the run"])
            self.close_report(idle)

    def _arm(self, now: float, limit: float) -> None:
        """Let the timer of faulthandler begin again: it writes only if this thread cannot run for so long."""
        if now - self._armed_at < limit / _LOOKS or _is_forking:
            return
        self._armed_at = now
        if os.fstat(self.dump).st_size:  # the lock was held, and is free again
            stack = stacks.parse(os.pread(self.dump, 2**17, 0).decode(errors="replace"))
            memory_files.replace(self.dump)
            if not self._peers and self._stuck_since is None and not stacks.is_at_rest(stack):
                self._stuck_since = self.at
                self._stuck_step = self.step + 1
        self._armed_for = limit
        self.arm_again()

    def arm_again(self) -> None:
        """Start the timer that a fork has ended, in the parent, or let it begin again."""
        if self._armed_for:
            faulthandler.dump_traceback_later(self._armed_for, file=self.dump)

    def describe(self, now: float) -> dict[str, Any]:
        """Return where this rank is, as the ranks send it to each other."""
        frames = sys._current_frames()
        stack = stacks.read(frames.get(self._main))
        place = stacks.find_place(stack)
        idle = now - max(self.at, self.floor)
        limit = self.limit()
        moves = idle < limit or stacks.is_at_rest(stack)
        if stacks.is_compiling(stack) and idle < _LONGER * self._after:
            moves = True
        if not moves and stacks.waits_for_data(stack):
            place = self._find_read(frames) or place
        return {"verb": place.verb, "name": place.name, "moves": moves, "idle": idle, "step": self.step}

    def is_last_chance(self, idle: float) -> bool:
        """Return whether a collective will soon end by its time limit: then a line is due in any case."""
        return self._timeout is not None and idle >= _SHARE * self._timeout

    def postpone(self, idle: float) -> None:
        """Look again later: a rank still moves."""
        self._next = idle + max(self._after / 2, _LONGEST_LOOK)

    def close_report(self, idle: float) -> None:
        """Do what follows a line on each rank. idle: seconds without progress."""
        self._next = 2 * idle
        if self._timeout and idle < _LAST_SHARE * self._timeout:
            self._next = min(self._next, _LAST_SHARE * self._timeout)
        if self._exits:
            if self._peers:
                self._peers.kill_others()
            if self.line:  # this rank may hold the store, in which the others find that they end
                time.sleep(_FAREWELL)
            errors.leave(errors.LOST_CONTACT)

    def report(self, idle: float, places: "dict[Any, Place]", names: "Any") -> None:
        """Print the line. places: by rank. names: see peers.py."""
        self.line = compose(idle, self.step + 1, places, names) + f" (stacks: {self._folder})"
        self._stuck_since = self.at
        self._stuck_step = self.step + 1
        if self._exits:
            self.is_ending = True
            errors.say_error(f"{self.line}; this run ends because of --stuck_exit true")
        else:
            print_line(self.line)

    def write_stacks(self, rank: int, idle: float, dump: str = "") -> None:
        """Write the stacks of a rank to its file, in a thread: the mount may hang. dump: what the timer of
        another rank has written; without it they are those of this process."""
        if self._writer and self._writer.is_alive():
            return
        text = dump or self._show_threads()
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        head = f"rank {rank}, {when}: no progress for {idle:.0f} s at step {self.step + 1}\n\n"
        data = (head + text).encode(errors="replace")[:_MOST_BYTES]

        def write() -> None:
            with contextlib.suppress(OSError):
                os.makedirs(self._folder, exist_ok=True)
                path = os.path.join(self._folder, f"rank_{rank}.txt")
                with open(f"{path}.new", "wb") as file:
                    file.write(data)
                os.replace(f"{path}.new", path)

        self._writer = threading.Thread(target=write, name="stacks", daemon=True)
        self._writer.start()

    def _show_threads(self) -> str:
        """Return the stacks of the threads of this process, and of the workers of its loaders."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = []
        for ident, frame in sys._current_frames().items():
            lines.append(f"thread {names.get(ident, ident)} (newest line first):")
            lines += stacks.show(stacks.read(frame))
            lines.append("")
        for pid, stack in self._ask_workers():
            lines.append(f"worker {pid} (newest line first):")
            lines += stacks.show(stack)
            lines.append("")
        lines.append("Stacks of C: py-spy dump --native --pid PID (pip install py-spy).")
        return "\n".join(lines) + "\n"

    def _find_read(self, frames: dict[int, Any]) -> Place | None:
        """Return where the thread or the worker is whose batch the loop waits for."""
        reads = waits.reads.copy()
        for thread in sorted(reads, key=reads.__getitem__):  # that which began first
            if thread != self._main:
                name = stacks.find_place(stacks.read(frames.get(thread))).name
                return Place(IN, f"{name} in a thread of the loader")
        for pid, stack in self._ask_workers():
            if speaker.is_stopped(pid):
                return Place(IN, f"its loader, whose worker {pid} is stopped by a signal (SIGSTOP)")
            if not stacks.is_idle(stack):
                return Place(IN, f"{stacks.find_place(stack).name} in a worker of the loader")
        return None

    def _ask_workers(self) -> list[tuple[int, Stack]]:
        """Return the stacks of the workers of loaders, which a signal makes them write."""
        answers: list[tuple[int, Stack]] = []
        children = multiprocessing.active_children()
        for child in children[:_MOST_WORKERS]:
            if _worker_dump is None or child.pid is None or not _catches(child.pid):
                continue
            memory_files.replace(_worker_dump)
            with contextlib.suppress(OSError):
                os.kill(child.pid, _SIGNAL)
                answers.append((child.pid, stacks.parse(_wait_for_dump(_worker_dump))))
        return answers


def start(folder: str, step: int, after: float, exits: bool = False, tells_ends: bool = True) -> Watch:
    """Begin to watch the run of this process, and return the Watch. Call it on every rank, in the thread of
    the loop; the ranks exchange what they know of themselves.

    tells_ends: say why a rank has died. An elastic job does so itself.
    """
    global _watch
    stop()
    peers = None
    if ranks.world_size() > 1:
        from bootfile.processes import peers as module  # a job of one process has none

        peers = module.meet(tells_ends)
    _register_once(after)
    _watch = Watch(folder, step, after, exits, peers)
    _watch.start()
    return _watch


def stop(is_early: bool = False) -> None:
    """End the watch of the run, if there is one. is_early: the process ends, and the run may not."""
    global _watch
    watch = _watch
    _watch = None
    if watch:
        watch.stop(is_early)


def explain(error: BaseException) -> None:
    """Say which rank has died, before this one ends with an error that this may have caused. After a time
    limit of a collective the last line about a run that does not move is repeated.

    The main thread calls it on each rank before the error is printed. It waits for some seconds at most.
    """
    watch = _watch
    if watch is None:
        return
    if watch.is_ending:
        time.sleep(2 * _FAREWELL)
    first_line = next(iter(str(error).splitlines()), "")
    is_contact = isinstance(error, RuntimeError) and _CONTACT.search(f"{type(error).__name__} {first_line}")
    if watch._peers and is_contact:
        watch._peers.announce_loss()  # before the save: the others then know that this rank is alive
    if is_contact and watch.at_loss:  # at once: a launcher may end this process after some seconds
        watch.at_loss()
    if watch._peers and is_contact:
        if watch.line and re.search("time(d )?out", str(error), re.IGNORECASE):
            print_line(watch.line)
        else:
            watch._peers.explain_loss()
    elif watch._peers and isinstance(error, Exception):
        watch._peers.announce_end(errors.in_one_line(error))
    stop(is_early=isinstance(error, SystemExit))


def has_lost_first() -> bool:
    """Return whether rank 0 has ended, as far as this rank, which has lost contact with some rank, learns
    within some seconds. The main thread calls it before this process ends."""
    return _watch is not None and _watch._peers is not None and _watch._peers.has_lost_first()


def compose(idle: float, step: int, places: dict[Any, Place], names: Any) -> str:
    """Return the line about a run that does not move. places: by rank; one without a rank is that of the
    only process. names: returns the name of a group of ranks, and its number of members."""
    groups: dict[Place, list[Any]] = {}
    for rank, place in places.items():
        groups.setdefault(place, []).append(rank)
    parts = []
    for place, members in groups.items():
        if members == [""]:
            parts.append(f"the process {_VERBS[place.verb][0]} {place.name}".rstrip())
            continue
        verb = _VERBS[place.verb][len(members) > 1]
        parts.append(f"{names(members)} {verb} {place.name}".rstrip())
    if len(parts) > _MOST_GROUPS:
        parts[_MOST_GROUPS:] = [f"and {len(parts) - _MOST_GROUPS} groups more"]
    return f"stuck for {idle:.0f} s at step {step}: {'; '.join(parts)}"


# verb of a Place -> of one rank, of several
_VERBS = {
    IN: ("is in", "are in"),
    stacks.WAITS: ("waits in", "wait in"),
    "stopped": ("is stopped by a signal (SIGSTOP)", "are stopped by a signal (SIGSTOP)"),
    "silent": ("is silent", "are silent"),
    "ended": ("has ended", "have ended"),
    "held": ("is in", "are in"),
}


def _find_timeout() -> float | None:
    """Return the seconds after which a collective of the default group fails; None if it is not known."""
    if ranks.world_size() == 1:
        return None
    with contextlib.suppress(AttributeError, RuntimeError):  # torch's names differ between versions
        group: Any = torch.distributed.group.WORLD
        device = torch.device("cpu" if ranks.uses_gloo() else "cuda")
        return float(group._get_backend(device).options._timeout.total_seconds())
    return None


def _wait_for_dump(descriptor: int) -> str:
    """Return what a worker has written, when it writes no more."""
    deadline = time.monotonic() + _WORKER_ANSWER
    size = 0
    while time.monotonic() < deadline:
        time.sleep(0.02)
        before = size
        size = os.fstat(descriptor).st_size
        if size and size == before:
            break
    return os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace")


def _catches(pid: int) -> bool:
    """Return whether a process has a handler for our signal, as a forked worker has: others would end."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (_SIGNAL - 1) & 1)
    return False


_is_forking = False


def _before_fork() -> None:
    """End the timer of faulthandler: a forked process that ends would wait for the thread that it lacks."""
    global _is_forking
    _is_forking = True
    if _watch:
        faulthandler.cancel_dump_traceback_later()


def _after_fork() -> None:
    global _is_forking
    _is_forking = False
    if _watch:
        _watch.arm_again()


def _after_fork_in_child() -> None:
    """Forget the run: the threads are in the parent."""
    global _watch
    _watch = None
    _after_fork()


def _register_once(after: float) -> None:
    """Register what a process needs once: the end, forks, errors, and the signal for workers."""
    global _is_hooked, _worker_dump
    if _is_hooked:
        return
    _is_hooked = True
    atexit.register(stop, is_early=True)
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explain(error)
        previous(kind, error, trace)

    sys.excepthook = report
    is_free = _SIGNAL > 0 and sys.platform == "linux" and signal.getsignal(_SIGNAL) == signal.SIG_DFL
    if after and is_free and not _catches(os.getpid()):
        _worker_dump = memory_files.make("workers")
        faulthandler.register(_SIGNAL, file=_worker_dump, all_threads=True)
