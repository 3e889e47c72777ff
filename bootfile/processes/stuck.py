"""Say where each rank is when a run does not move, and why a rank has died.

    watch = stuck.start(folder, step, after=60)     on each rank, before the first step
    watch.clock.note(step)                          at the end of each step
    stuck.stop()

If no step ends for some time, each rank writes the stacks of its threads to FOLDER/stuck, and one rank prints
a line with the place of each rank. A thread does that (roll_call.py); if C code holds the lock of Python, no
thread of Python runs, and another process of the node says it (node.py). Outside: a system without /proc: a
line there has only what threads of Python can see.
"""

import atexit
import contextlib
import functools
import json
import math
import multiprocessing
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from bootfile.ground.errors import print_line
from bootfile.processes import ranks, stacks, waits
from bootfile.processes.report import Clock, Pulse, Report
from bootfile.processes.stacks import IN, Place, Stack

FOLDER = "stuck"
_LOOKS = 8  # in the time after which a run is stuck
_LONGEST_LOOK = 1.0  # seconds between two looks
_PAUSE = 3.0  # seconds, or looks, for which the thread did not run: the process was stopped
_MOST_WORKERS = 16  # of a loader whose stacks are written
_FAREWELL = 2.0  # seconds that the end waits for the thread
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_START = "import sys; sys.path.insert(0, sys.argv[1]); from bootfile.processes import node; node.main()"

_watch: "Watch | None" = None  # of the run that trains in this process
_make_pulse = functools.cache(Pulse)  # one for all runs of the process


class Watch:
    """The thread that watches whether a run moves. Make one on every rank: they exchange facts about each.

    folder: the output folder.
    step: the number of steps done so far.
    after: the shortest time without progress after which the run is stuck, in seconds; 0: it never is.
    exits: end the process after the line about a run that is stuck.
    tells_ends: print why a rank has died.

    `at_loss`: called when this rank has lost contact with another one.
    """

    def __init__(self, folder: str, step: int, after: float, exits: bool, tells_ends: bool = True):
        self.at_loss: Callable[[], object] = lambda: None
        self.clock = Clock(step, after, _find_timeout())
        self.report = Report(os.path.join(folder, FOLDER), exits, self.name, self._show_threads)
        self.others: Any = None  # Others, if there are several ranks
        self._batches = waits.batches
        self._main = threading.get_ident()
        self._pulse = _make_pulse()
        self._is_stopped = threading.Event()
        self._reader, self._writer = os.pipe()  # readable when the run has ended
        self._poll = select.poll()
        self._poll.register(self._reader, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="stuck", daemon=True)
        self._speaker: subprocess.Popen[bytes] | None = None
        if ranks.world_size() > 1:
            from bootfile.processes.others import Others  # a job of one process does not need them

            self.others = Others(self.clock, self.report, self._pulse.files, self.find_place, tells_ends)
            for descriptor in self.others.descriptors:
                self._poll.register(descriptor, select.POLLIN)

    def start(self) -> None:
        """Start the thread, and on the first rank of each node the process of node.py."""
        self._pulse.beat(self.clock)  # C code may hold the lock of Python before the thread writes a beat
        if self.clock.after or self.others:
            self._thread.start()
        files = {ranks.rank(): self._pulse.files}  # rank -> files, for each rank of this node
        if self.others:
            files |= {rank: seen.files for rank, seen in self.others.local.items()}
        if self.clock.after and sys.platform == "linux" and min(files) == ranks.rank():
            members = [[rank, self.name([rank]), files[rank]] for rank in sorted(files)]
            folder, exits = self.report.folder, self.report.exits
            settings = {"parent": os.getpid(), "ranks": members, "folder": folder, "exits": exits}
            command = [sys.executable, "-I", "-S", "-c", _START, _ROOT, json.dumps(settings)]
            with contextlib.suppress(OSError):
                # a session of its own: Ctrl-C in a terminal is not for it
                self._speaker = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def stop(self, is_early: bool) -> None:
        """End the threads. is_early: this process ends, by sys.exit() or with its script, before the run."""
        self._is_stopped.set()
        if self._speaker:
            self._speaker.kill()
            self._speaker.wait()
        os.write(self._writer, b"\0")
        if self._thread.ident:
            self._thread.join(_FAREWELL)
        self._pulse.end()
        if self.others:
            self.others.leave(is_early)
        if self._thread.is_alive():  # it still uses the files below
            return
        if self.others:
            self.others.close()
        os.close(self._reader)
        os.close(self._writer)

    def name(self, members: list[int]) -> str:
        """Return ranks in words: "rank 3 on node b"."""
        return self.others.name(members) if self.others else "the process"

    def _run(self) -> None:
        """Call look() until stop(): the thread "stuck"."""
        while not self._is_stopped.is_set():
            limit = self.clock.step_limit() / _LOOKS if self.clock.after else _LONGEST_LOOK
            pause = min(_LONGEST_LOOK, limit)
            began = time.monotonic()
            # the wait ends early if a rank of this node ends, or at stop()
            for descriptor, _ in self._poll.poll(1000 * pause):
                self._poll.unregister(descriptor)
            now = time.monotonic()
            if now - began > pause + _PAUSE * max(1.0, pause):
                self._note_pause(now, now - began)
            if not self._is_stopped.is_set():
                self.look(now)

    def _note_pause(self, now: float, seconds: float) -> None:
        """Note that no thread of this process ran for some seconds. Rank 0 prints a line about it: if all
        processes were stopped at once, no other one could."""
        self.clock.floor = now
        if 0 < self.clock.after <= seconds and ranks.is_first():
            text = f"nothing moved for {seconds:.0f} s at step {self.clock.step + 1}: "
            print_line(f"{text}{self.name([0])} was stopped, or C code held its lock of Python")

    def look(self, now: float) -> None:
        """Print what is due. The thread calls it repeatedly."""
        clock = self.clock
        self._pulse.beat(clock)
        if waits.batches != self._batches:  # batches were read, for example by an evaluation
            self._batches = waits.batches
            clock.at = max(clock.at, now)
        self.report.note_progress(clock)
        if self.others:
            self.others.look(now)
        elif clock.is_due(now):
            place, moves = self.find_place(now)
            if moves:
                clock.postpone(now)
                return
            self.report.write_stacks(0, clock, now)
            self.report.show(clock, clock.idle(now), {0: place})
            clock.end_call(now)
            self.report.end_call()

    def find_place(self, now: float) -> tuple[Place, bool]:
        """Return where the loop of this process is, and whether it moves or has a reason to take so long."""
        frames = sys._current_frames()
        stack = stacks.read(frames.get(self._main))
        place = stacks.find_place(stack)
        is_in_time = self.clock.idle(now) < self.clock.limit()
        compiles = stacks.is_compiling(stack) and self.clock.may_compile(now)
        if is_in_time or compiles or stacks.is_at_rest(stack):
            return place, True
        if stacks.waits_for_data(stack):
            place = self._find_read(frames) or place
        return place, False

    def _find_read(self, frames: dict[int, Any]) -> Place | None:
        """Return where the thread or worker is whose batch the loop waits for; None if it is not known."""
        reads = waits.reads.copy()
        for thread in sorted(reads, key=reads.__getitem__):  # the thread that began first
            if thread != self._main:
                name = stacks.find_place(stacks.read(frames.get(thread))).name
                return Place(IN, f"{name} in a thread of the loader")
        from bootfile.processes import ends  # most runs end without it

        for pid, stack in self._ask_workers():
            if ends.is_stopped(pid):
                return Place(IN, f"its loader, whose worker {pid} is stopped by a signal (SIGSTOP)")
            if not stacks.is_idle(stack):
                return Place(IN, f"{stacks.find_place(stack).name} in a worker of the loader")
        return None

    def _ask_workers(self) -> list[tuple[int, Stack]]:
        """Return the stacks of the workers of loaders, which a signal makes them write."""
        pids = [child.pid for child in multiprocessing.active_children()[:_MOST_WORKERS] if child.pid]
        dump = self._pulse.files["dump"]
        return [(pid, stacks.parse(stacks.ask(pid, os.getpid(), dump))) for pid in pids]

    def _show_threads(self) -> str:
        """Return the stacks of the threads of this process, and of the workers of its loaders."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames().items()
        shown = [
            stacks.show(f"thread {names.get(ident, ident)}", stacks.read(frame)) for ident, frame in frames
        ]
        shown += [stacks.show(f"worker {pid}", stack) for pid, stack in self._ask_workers()]
        return "\n".join([*shown, "Stacks of C: py-spy dump --native --pid PID (pip install py-spy).\n"])


def start(folder: str, step: int, after: float, exits: bool = False, tells_ends: bool = True) -> Watch:
    """Begin to watch the run of this process, and return the Watch. Call it on every rank, in the thread of
    the loop. Parameters: see Watch. An elastic job says itself why a rank has died."""
    global _watch
    stop()
    _register_once()
    _watch = Watch(folder, step, after, exits, tells_ends)
    _watch.start()
    return _watch


def stop(is_early: bool = False) -> None:
    """Stop watching the run, if one is watched. is_early: this process ends before the run does."""
    global _watch
    watch = _watch
    _watch = None
    if watch:
        watch.stop(is_early)


def explain(error: BaseException) -> None:
    """Print which rank has died, if this may be the cause of an error that ends this process. If a collective
    has reached its time limit, print the last line about a run that does not move again.

    The main thread calls it on each rank before the error is printed. It waits for some seconds at most.
    """
    if _watch is None:
        return
    if _watch.report.is_ending:
        time.sleep(2 * _FAREWELL)
    if _watch.others:
        _watch.others.explain(error, _watch.at_loss)
    stop(is_early=isinstance(error, SystemExit))


def has_lost_first() -> bool:
    """Return whether rank 0 has ended. A rank that has lost contact with another one calls it in its main
    thread before it ends. It waits for some seconds at most."""
    return _watch is not None and _watch.others is not None and _watch.others.ends.has_lost_first()


def _find_timeout() -> float:
    """Return the seconds after which a collective of several ranks fails; infinity if not known."""
    if ranks.world_size() == 1:
        return math.inf
    with contextlib.suppress(AttributeError, RuntimeError):  # torch's names differ between versions
        group: Any = torch.distributed.group.WORLD
        device = torch.device("cpu" if ranks.uses_gloo() else "cuda")
        return float(group._get_backend(device).options._timeout.total_seconds())
    return math.inf


def _forget() -> None:
    """Forget the run in a forked process: the threads, and the file of the beats, are those of the parent."""
    global _watch
    _watch = None
    _make_pulse.cache_clear()


@functools.cache
def _register_once() -> None:
    """Call stop() at the end of this process, _forget() after a fork, and explain() before an error."""
    atexit.register(stop, is_early=True)
    os.register_at_fork(after_in_child=_forget)
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explain(error)
        previous(kind, error, trace)

    sys.excepthook = report
