"""When a run is stuck, and the one line that says so: where each rank is, and where its stacks are."""

import collections
import contextlib
import dataclasses
import json
import math
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from bootfile.ground import errors
from bootfile.ground.errors import print_line
from bootfile.processes import stacks
from bootfile.processes.stacks import ENDED, HELD, IN, SILENT, STOPPED, WAITS, Place

_MEDIANS = 20  # or as many median steps as the seconds of --stuck_after, if that is longer
_STEPS = 64  # whose median it is
_LONGER = 4  # times as long are the first step, a compilation, an evaluation and a save
_SHARE = 0.7  # share of the time limit of a collective after which a line comes
_PATIENCE = 10.0  # seconds for the answers of all ranks, or this share of that limit, which may end the run
_PATIENCE_SHARE = 0.15
_SHORTEST_POSTPONED = 1.0  # seconds
_BEAT_BYTES = 128
_MOST_BYTES = 2**17  # of a file of stacks
_MOST_GROUPS = 12  # of ranks in a line
_FAREWELL = 2.0  # seconds in which the others find in the store that they end, too

# verb of a Place -> of one rank, of several
_VERBS = {
    IN: ("is in", "are in"),
    WAITS: ("waits in", "wait in"),
    HELD: ("is in", "are in"),
    STOPPED: ("is stopped by a signal (SIGSTOP)", "are stopped by a signal (SIGSTOP)"),
    SILENT: ("is silent", "are silent"),
    ENDED: ("has ended", "have ended"),
}


class Clock:
    """When a run has moved last, and after how many seconds without progress it is stuck. It has no thread.

    step: the number of steps done so far.
    after: the shortest time without progress after which the run is stuck, in seconds; 0: it never is.
    timeout: seconds after which a collective fails; infinity if that is not known.
    """

    def __init__(self, step: int, after: float, timeout: float = math.inf):
        self.step = step
        self.at = time.monotonic()  # when something has moved last
        self.floor = 0.0  # when this process continued, if it was stopped itself
        self.after = after
        self.model: Any = None  # in the mode of evaluation while a loop evaluates it
        self.patience = min(_PATIENCE, _PATIENCE_SHARE * timeout)
        self._timeout = timeout
        # whether more than a step happens until the next note(): an evaluation, a save or the first step
        self._has_more = True
        self._durations: collections.deque[float] = collections.deque(maxlen=_STEPS)  # seconds of steps
        self._not_before = 0.0  # seconds without progress before which no further line comes

    def note(self, step: int, is_longer: bool = False) -> None:
        """Note the end of a step. is_longer: the run evaluates or saves before the next step ends."""
        now = time.monotonic()
        if not self._has_more:
            self._durations.append(now - self.at)
        self.at = now
        self.step = step
        self._has_more = is_longer

    def touch(self) -> None:
        """Note that something else has ended: a save or an evaluation."""
        self.at = time.monotonic()

    def idle(self, now: float) -> float:
        """Return the seconds without progress."""
        return now - max(self.at, self.floor)

    def limit(self) -> float:
        """Return the seconds without progress after which the run is stuck."""
        is_evaluating = self.model is not None and not self.model.training
        limit = self.step_limit() * (_LONGER if self._has_more or is_evaluating else 1)
        return min(limit, _SHARE * self._timeout)

    def step_limit(self) -> float:
        """Return the seconds after which a step without an evaluation or a save is stuck."""
        return max(self.after, _MEDIANS * statistics.median(self._durations or [0.0]))

    def beat_limit(self) -> float:
        """Return the seconds after which a process whose Python does not run is stuck."""
        return self.step_limit() if self._durations else self.limit()

    def may_compile(self, now: float) -> bool:
        """Return whether a compilation may still take so long."""
        return self.idle(now) < _LONGER * self.after

    def is_due(self, now: float, turn: float = 0.0) -> bool:
        """Return whether a line about a run that does not move is due. turn: seconds more, in which a rank
        before this one may print it."""
        idle, limit = self.idle(now), self.limit()
        if idle < limit:  # the run has moved since the last line
            self._not_before = 0.0
        return self.after > 0 and idle >= max(limit + turn, self._not_before)

    def postpone(self, now: float) -> None:
        """Let the next line come some time later: a rank still moves."""
        self._not_before = self.idle(now) + max(self.after / 2, _SHORTEST_POSTPONED)

    def end_call(self, now: float) -> None:
        """Let the next line come when the run has been stuck for twice as long."""
        self._not_before = 2 * self.idle(now)


class Pulse:
    """The beats of this process, which other processes of the node read. `files`: what Seen needs for it.

    The file stays open until the process ends: they would read another one that gets its descriptor, and take
    what is in a pipe.
    """

    def __init__(self) -> None:
        file = stacks.make_file("beats")
        os.ftruncate(file, _BEAT_BYTES)
        # C code may take the lock of Python at any system call: none is between the old beat and the new one
        self._map = mmap.mmap(file, _BEAT_BYTES)
        self.files = {"pid": os.getpid(), "beats": file, "dump": stacks.write_on_signal()}

    def beat(self, clock: Clock) -> None:
        """Write that Python runs now, and what another process has to know to print the line."""
        self._write(time.monotonic(), clock.beat_limit(), clock.at, clock.step)

    def end(self) -> None:
        """Write that no run is watched in this process from now on."""
        self._write(math.inf, 0.0, 0.0, 0)

    def _write(self, *beat: float) -> None:
        self._map[:] = json.dumps(beat).encode().ljust(_BEAT_BYTES)


@dataclasses.dataclass
class Report:
    """Prints the line about a run that does not move, and writes the stacks to a folder."""

    folder: str
    exits: bool  # end the process after a line
    name: Callable[[list[int]], str]  # returns the words for a list of ranks
    stacks_here: Callable[[], str]  # returns the stacks of this process
    line: str = ""  # the last line that this process has printed
    is_ending: bool = False  # the watching thread ends the process
    _stuck: tuple[float, int] | None = None  # when the run had moved last, and its step
    _writer: threading.Thread | None = None

    def show(self, clock: Clock, idle: float, places: Mapping[int, Place]) -> None:
        """Print the line about a run that does not move for `idle` seconds. places: rank -> its place."""
        self.line = compose(idle, clock.step + 1, places, self.name, self.folder)
        self._stuck = (clock.at, clock.step + 1)
        if self.exits:
            self.is_ending = True
            errors.say_error(f"{self.line}; this run ends because of stuck_exit")
        else:
            print_line(self.line)

    def note_progress(self, clock: Clock) -> None:
        """Print a line if the run moves again."""
        if self._stuck and clock.at > self._stuck[0]:
            seconds = clock.at - self._stuck[0]
            print_line(f"the run moves again: {seconds:.0f} s were lost at step {self._stuck[1]}")
            self._stuck = None

    def end_call(self) -> None:
        """End the process if `exits`. The watching thread calls it after a line of any rank."""
        if self.exits:
            if self.line:  # this rank may hold the store: the others read there that they end, too
                time.sleep(_FAREWELL)
            errors.leave(errors.LOST_CONTACT)

    def write_stacks(self, rank: int, clock: Clock, now: float, text: str = "") -> None:
        """Write the stacks of a rank to its file, in a thread: the mount may hang. text: the stacks (default:
        those of this process)."""
        if self._writer and self._writer.is_alive():
            return
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        text = text or self.stacks_here()
        head = f"rank {rank}, {when}: no progress for {clock.idle(now):.0f} s at step {clock.step + 1}"
        arguments = (self.folder, rank, f"{head}\n\n{text}")
        self._writer = threading.Thread(target=write_file, args=arguments, name="stacks", daemon=True)
        self._writer.start()


def write_file(folder: str, rank: int, text: str) -> None:
    """Write the file of a rank, if the folder can be written."""
    path = os.path.join(folder, f"rank_{rank}.txt")
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        with open(f"{path}.new", "wb") as file:
            file.write(text.encode(errors="replace")[:_MOST_BYTES])
        os.replace(f"{path}.new", path)


def compose(
    idle: float, step: int, places: Mapping[int, Place], name: Callable[[list[int]], str], folder: str
) -> str:
    """Return the line about a run that does not move. It names ranks that are at the same place together."""
    groups: dict[Place, list[int]] = {}
    for rank, place in places.items():
        groups.setdefault(place, []).append(rank)
    parts = []
    for place, members in groups.items():
        verb = _VERBS[place.verb][len(members) > 1]
        parts.append(f"{name(members)} {verb} {place.name}".rstrip())
    if len(parts) > _MOST_GROUPS:
        parts[_MOST_GROUPS:] = [f"and {len(parts) - _MOST_GROUPS} more"]
    return f"stuck for {idle:.0f} s at step {step}: {'; '.join(parts)} (stacks: {folder})"
