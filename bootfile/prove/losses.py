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
        self._log, self._progress, self._plan = os.path.abspath(log), progress, deque(plan)
        self._place = os.path.getsize(log) if os.path.exists(log) else 0  # bytes of an earlier run
        self._last = deque[str](maxlen=4)
        self._pids: list[int] = []
        self._gone, self._killed_at = set[int](), 0.0
        self.generation, self.killed = 0, list[tuple[int, tuple[int, ...]]]()

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
        if self._pids and self._plan and not self._gone and steps >= self._plan[0][0]:
            _, ranks = self._plan.popleft()
            self._gone, self._killed_at = {self._pids[rank] for rank in ranks}, time.monotonic()
            for pid in self._gone & sessions.find(self._log).keys():  # else not of this run
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.killed.append((steps, ranks))
        return steps

    def describe(self) -> str:
        """Return what was done, in words."""
        kills = [f"{' and '.join(map(str, ranks))} after step {steps}" for steps, ranks in self.killed]
        return f"SIGKILL to rank {', '.join(kills)}; {self.generation} generations" if kills else "no SIGKILL"

    def explain(self, error: trial.Failed) -> trial.Failed:
        """Return the error with what was done and the last lines of the output."""
        self._read()
        return trial.Failed(f"{self.describe()}: {error} ({' | '.join(self._last)})", error.code)

    def _read(self) -> None:
        with open(self._log, "rb") as file:
            file.seek(self._place)
            text = file.read().rpartition(b"\n")[0]
            self._place += len(text)  # the next text begins with the end of this line
        for line in filter(None, map(str.strip, text.decode(errors="replace").splitlines())):
            self._last.append(line)
            if match := sessions.GENERATION.fullmatch(line):
                self.generation, self._pids = int(match[1]), [*map(int, match[2].split())]
                self._gone = self._gone if self._gone & {*self._pids} else set()
