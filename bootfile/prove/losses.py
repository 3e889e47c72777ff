"""SIGKILLs to processes of a job with --elastic true, whose other processes stay alive."""

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable

from bootfile.processes import sessions
from bootfile.prove import trial

_PATIENCE = 300.0  # seconds from a SIGKILL to the next generation


class Losses:
    """The SIGKILLs of a run that begins now. Each one waits for the generation after the one before.

    log: the file for the output of the run, which is also its mark (processes.py).
    progress: returns the steps so far.
    plan: (a step, ranks that get a SIGKILL after it), ascending.
    killed: (steps so far, ranks) of each SIGKILL. generation: the present one, 0 before the first.
    """

    def __init__(self, log: str, progress: Callable[[], int], plan: list[tuple[float, tuple[int, ...]]]):
        self._log = os.path.abspath(log)
        self._progress = progress
        self._plan = deque(plan)
        self._place = 0  # bytes of the log that were read
        if os.path.exists(log):  # the run is made again: the lines of the first one do not count
            self._place = os.path.getsize(log)
        self._last = deque[str](maxlen=4)  # lines of the output
        self._pids: list[int] = []  # the process ids of the present generation, by rank
        self._gone: set[int] = set()  # processes of the last SIGKILL, until a generation without them begins
        self._killed_at = 0.0
        self.generation = 0
        self.killed: list[tuple[int, tuple[int, ...]]] = []

    @property
    def is_done(self) -> bool:
        """Return whether the job has continued after each SIGKILL, and none is left."""
        self._read()
        return not self._plan and not self._gone

    def watch(self) -> int:
        """Kill what is due, and return the steps so far. Raises trial.Failed."""
        self._read()
        steps = self._progress()
        if self._gone and time.monotonic() - self._killed_at > _PATIENCE:
            raise trial.Failed(f"no generation began within {_PATIENCE:g} s", 1)
        # the next SIGKILL waits until the job has continued after the one before
        is_ready = self._pids and self._plan and not self._gone
        if is_ready and steps >= self._plan[0][0]:
            _, ranks = self._plan.popleft()
            self._gone = {self._pids[rank] for rank in ranks}
            self._killed_at = time.monotonic()
            # a process id of the log may be another program's by now: those with the mark are killed
            for pid in self._gone & sessions.find(self._log).keys():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.killed.append((steps, ranks))
        return steps

    def describe(self) -> str:
        """Return what was done, in words."""
        if not self.killed:
            return "no SIGKILL"
        kills = []
        for steps, ranks in self.killed:
            names = " and ".join(str(rank) for rank in ranks)
            kills.append(f"{names} after step {steps}")
        return f"SIGKILL to rank {', '.join(kills)}; {self.generation} generations"

    def explain(self, error: trial.Failed) -> trial.Failed:
        """Return the error with what was done and the last lines of the output."""
        self._read()
        return trial.Failed(f"{self.describe()}: {error} ({' | '.join(self._last)})", error.code)

    def _read(self) -> None:
        """Read the new lines of the output: the last ones, and the processes of a new generation."""
        with open(self._log, "rb") as file:
            file.seek(self._place)
            text = file.read().rpartition(b"\n")[0]
            self._place += len(text)  # the next text begins with the end of this line
        for text_of_line in text.decode(errors="replace").splitlines():
            line = text_of_line.strip()
            if not line:
                continue
            self._last.append(line)
            match = sessions.GENERATION.fullmatch(line)
            if match:
                self.generation = int(match[1])
                self._pids = [int(pid) for pid in match[2].split()]
                # a generation that still names a killed process began before its loss was noticed
                if not self._gone & {*self._pids}:
                    self._gone = set()
