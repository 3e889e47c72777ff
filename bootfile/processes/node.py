"""The ranks of this node, as another process sees them without their help: ended, stopped, or with C code
that holds their lock of Python.

Each rank writes a beat to a file in memory as long as its Python runs. If no rank of the node does, a small
process without torch prints the line: the first rank of each node starts it, and it ends with that rank.
"""

import contextlib
import json
import os
import signal
import sys
import time

from bootfile.ground.errors import print_line
from bootfile.processes import report, stacks
from bootfile.processes.ends import Process, is_stopped
from bootfile.processes.stacks import ENDED, HELD, IN, STOPPED, Place

PAUSED = Place(IN, "a debugger")
_POLL = 0.5  # seconds
_BLOCKED_LOOKS = 4  # looks in a row in which all ranks are blocked: a long call of C, or a pause, has ended


class Seen:
    """A process of this node, as other processes see it.

    files: those of its Pulse: "pid", its process id, and "beats" and "dump", descriptors in that process.
    `dump`: the stacks that it has written last, "" before look() asks for them.
    """

    def __init__(self, files: dict[str, int]):
        self.process = Process(files["pid"])
        self.dump = ""
        self.files = files

    def read_beat(self) -> tuple[float, float, float, int]:
        """Return the last beat: (its time, the seconds to the next beat, when the run had moved last, the
        step of the run)."""
        path = f"/proc/{self.files['pid']}/fd/{self.files['beats']}"
        # ValueError: it is being written
        with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
            at, limit, moved, step = json.loads(file.read())
            return at, limit, moved, step
        return time.monotonic(), 1.0, time.monotonic(), 0  # as if it had just written one

    def runs(self, silence: float = 0.0) -> bool:
        """Return whether its Python runs. silence: seconds without a beat after which it does not; 0: the
        seconds that the beat names."""
        if self.process.has_ended() or is_stopped(self.process.pid):
            return False
        at, limit, _, _ = self.read_beat()
        return time.monotonic() - at < (silence or limit)

    def look(self, silence: float = 0.0) -> Place | None:
        """Return why the process cannot write its own place, as a Place; None if it can. silence: as for
        runs()."""
        if self.runs(silence):
            return None
        if self.process.has_ended():
            return Place(ENDED, "")
        if is_stopped(self.process.pid):
            return Place(STOPPED, "")
        self.dump = stacks.ask(self.process.pid, self.files["pid"], self.files["dump"])
        stack = stacks.parse(self.dump)
        if self.dump and stacks.is_at_rest(stack):  # debugpy stops all threads
            return PAUSED
        return Place(HELD, f"{stacks.find_place(stack).name}, in C code that holds Python's lock")

    def kill(self) -> None:
        """End the process by SIGKILL: one whose lock is held runs no handler of Python."""
        with contextlib.suppress(OSError):
            os.kill(self.process.pid, signal.SIGKILL)


def main() -> None:
    """Look at the ranks of the node until their first process ends.

    The settings are the argument of the process: parent, its process id; ranks, [rank, name, files of its
    Pulse] of each rank; folder and exits, as for a Report.
    """
    settings = json.loads(sys.argv[2])
    names = {rank: name for rank, name, _ in settings["ranks"]}
    seen = {rank: Seen(files) for rank, _, files in settings["ranks"]}
    blocked_looks = 0
    while os.getppid() == settings["parent"]:
        time.sleep(_POLL)
        # a rank that runs Python prints the line itself; this process does it if none can
        is_blocked = not any(process.runs() for process in seen.values())
        blocked_looks = blocked_looks + 1 if is_blocked else 0
        if blocked_looks == _BLOCKED_LOOKS:  # one line for each time that the run is stuck
            _say(settings["folder"], settings["exits"], names, seen)


def _say(folder: str, exits: bool, names: dict[int, str], seen: dict[int, Seen]) -> None:
    """Print the line and write the stacks, if the lock of a rank is held and none can move."""
    looks = {rank: process.look() for rank, process in seen.items()}
    places = {rank: place for rank, place in looks.items() if place}
    # else all were stopped at once, or have ended
    is_held = any(place.verb == HELD for place in places.values())
    if not is_held or len(places) < len(seen) or PAUSED in places.values():
        return
    _, _, moved, step = seen[min(seen)].read_beat()

    def name(members: list[int]) -> str:
        return ", ".join(names[rank] for rank in members)

    print_line(report.compose(time.monotonic() - moved, step + 1, places, name, folder))
    for rank, process in seen.items():
        if process.dump:
            report.write_file(folder, rank, process.dump)
        if exits:
            process.kill()
