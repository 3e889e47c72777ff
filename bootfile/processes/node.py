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
from typing import Any

from bootfile.ground.errors import print_line
from bootfile.processes import report, stacks
from bootfile.processes.ends import Process
from bootfile.processes.stacks import ENDED, HELD, IN, STOPPED, Place

PAUSED = Place(IN, "a debugger")
_POLL = 0.5  # seconds
_AGAIN = 4  # looks in which all must still be blocked: a long call of C ends, as does a pause of the node


class Seen:
    """A process of this node. files: of its Pulse. `dump`: the stacks that it has written last."""

    def __init__(self, files: dict[str, int]):
        self.process = Process(files["pid"])
        self.dump = ""
        self.files = files

    def read_beat(self) -> tuple[float, float, float, int]:
        """Return the last beat: its time, the seconds to the next one, when the run had moved, its step."""
        path = f"/proc/{self.files['pid']}/fd/{self.files['beats']}"
        # ValueError: it is being written, or the process has left the training
        with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
            at, limit, moved, step = json.loads(file.read())
            return at, limit, moved, step
        return time.monotonic(), 1.0, time.monotonic(), 0

    def runs(self, silence: float = 0.0) -> bool:
        """Return whether its Python runs. silence: seconds without a beat; 0: as many as it has set."""
        if self.process.has_ended() or self.process.is_stopped():
            return False
        at, limit, _, _ = self.read_beat()
        return time.monotonic() - at < (silence or limit)

    def look(self, silence: float = 0.0) -> Place | None:
        """Return what keeps the process from being asked; None if it can be."""
        if self.process.has_ended():
            return Place(ENDED, "")
        if self.process.is_stopped():
            return Place(STOPPED, "")
        if self.runs(silence):
            return None
        self.dump = stacks.ask(self.process.pid, self.files["pid"], self.files["dump"])
        stack = stacks.parse(self.dump)
        if self.dump and stacks.is_at_rest(stack):  # debugpy stops all threads
            return PAUSED
        return Place(HELD, f"{stacks.find_place(stack).name}, in C code that holds Python's lock")


def main() -> None:
    """Look at the ranks of the node until their first process ends.

    The settings are the argument of the process: parent, its process id; ranks, [rank, its words, its files]
    of each; folder; exits.
    """
    settings = json.loads(sys.argv[2])
    names = {rank: name for rank, name, _ in settings["ranks"]}
    seen = {rank: Seen(files) for rank, _, files in settings["ranks"]}
    blocked = 0  # looks
    while os.getppid() == settings["parent"]:
        time.sleep(_POLL)
        # a rank that runs Python prints the line itself; this one is for the case that none can
        blocked = 0 if any(each.runs() for each in seen.values()) else blocked + 1
        if blocked == _AGAIN:  # one line for each time that the run is stuck
            places = {rank: each.look() for rank, each in seen.items()}
            _say(settings, names, seen, {rank: place for rank, place in places.items() if place})


def _say(
    settings: dict[str, Any], names: dict[int, str], seen: dict[int, Seen], places: dict[int, Place]
) -> None:
    """Print the line and write the stacks, if the lock of a rank is held and none can move."""
    if len(places) < len(seen) or PAUSED in places.values():
        return
    if not any(place.verb == HELD for place in places.values()):  # all were stopped at once, or have ended
        return
    _, _, moved, step = seen[min(seen)].read_beat()

    def name(members: list[int]) -> str:
        return ", ".join(names[rank] for rank in members)

    print_line(report.compose(time.monotonic() - moved, step + 1, places, name, settings["folder"]))
    for rank, each in seen.items():
        if each.dump:
            report.write_file(settings["folder"], rank, each.dump)
        if settings["exits"]:  # by SIGKILL: a process whose lock is held runs no handler of Python
            with contextlib.suppress(OSError):
                os.kill(each.process.pid, signal.SIGKILL)
