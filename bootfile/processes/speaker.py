"""Print the line about a run that does not move, if no rank of this node can: the lock of Python is held in
all of them, or they are stopped.

It runs in a small process of its own, which loads no torch: the first rank of each node starts it (stuck.py).
It ends with that rank.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from bootfile.ground.errors import print_line
from bootfile.processes import stacks

_POLL = 0.5  # seconds
_AGAIN = 2.0  # seconds after which all dumps must still be there: a rank may have continued
_MOST_BYTES = 2**17
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_START = "import sys; sys.path.insert(0, sys.argv[1]); from bootfile.processes import speaker; speaker.main()"


def start(settings: dict[str, Any]) -> "subprocess.Popen[bytes] | None":
    """Start the process, and return it; None if that is not possible. settings: see main()."""
    command = [sys.executable, "-I", "-S", "-c", _START, _ROOT, json.dumps(settings)]
    with contextlib.suppress(OSError):
        # a session of its own: Ctrl-C in a terminal is not for it
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    return None


def main() -> None:
    """Look at the ranks of the node until their first process ends.

    The settings are the argument of the process: parent, its process id; ranks, [rank, pid, descriptor of the
    file of stacks] of each; names; folder; after; exits.
    """
    settings = json.loads(sys.argv[2])
    has_said = False
    since = 0.0
    while os.getppid() == settings["parent"]:
        time.sleep(_POLL)
        dumps = [_read(pid, descriptor) for _, pid, descriptor in settings["ranks"]]
        blocked = []
        for dump, (_, pid, _) in zip(dumps, settings["ranks"], strict=True):
            blocked.append(is_stopped(pid) or (bool(dump) and not stacks.is_at_rest(stacks.parse(dump))))
        # a rank that still runs Python prints the line itself; this one is for the case that none can
        if not all(blocked) or not any(dumps):
            has_said = False
            since = time.monotonic()
        # one line for each time that the run is stuck; after a while, because a long call of C ends by itself
        elif not has_said and time.monotonic() - since > _AGAIN:
            has_said = True
            _say(settings, dumps)


def _say(settings: dict[str, Any], dumps: list[str]) -> None:
    """Print the line and write the stacks. dumps: of the ranks, "" for one that is stopped."""
    parts = []
    for (rank, _, _), name, dump in zip(settings["ranks"], settings["names"], dumps, strict=True):
        if dump:
            place = stacks.find_place(stacks.parse(dump)).name
            parts.append(f"{name} is in {place}, in C code that holds Python's lock")
            _write(settings["folder"], rank, dump)
        else:
            parts.append(f"{name} is stopped by a signal (SIGSTOP)")
    line = f"stuck for {settings['after']:.0f} s or more: {'; '.join(parts)}"
    print_line(f"{line} (stacks: {settings['folder']})")
    if settings["exits"]:
        # by SIGKILL: a process whose lock is held runs no handler of Python
        for _, pid, _ in settings["ranks"]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _write(folder: str, rank: int, dump: str) -> None:
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"rank_{rank}.txt"), "w", encoding="utf-8") as file:
            file.write(dump)


def _read(pid: int, descriptor: int) -> str:
    """Return what the timer of a rank has written, which it does when no thread of Python can run."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
        return file.read(_MOST_BYTES).decode(errors="replace")
    return ""


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] in "tT"
    return False
