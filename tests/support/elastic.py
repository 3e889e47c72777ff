"""A job with --elastic true, as a user starts it: its processes by rank, and when it finished each step."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from bootfile.processes.sessions import GENERATION
from tests import conftest
from tests.conftest import LONGEST, ROOT, start
from tests.support.exact import changed

JOB = ("--dataset=digits", "--width=8", "--batch_size=256", "--report_every=1", "--lr=0.05")
_STEP = re.compile(r"(?:\[node \d+\] )?epoch=\d+ step=(\d+)/\d+ .* loss=")


class ElasticRun:
    """A run of `*prefix python *command`, whose output a thread reads. steps: (time.monotonic(), step) of all
    reports. pids: by rank, of the present generation. generation: counted from 1; 0 before the first. lines:
    all others."""

    def __init__(self, *command: str | Path, prefix: tuple[str, ...] = (), cwd: Path = ROOT):
        self.steps: list[tuple[float, int]] = []
        self.pids: list[int] = []
        self.generation, self.lines = 0, list[str]()
        options = {"cwd": cwd, "env": conftest.environment(), "stderr": subprocess.STDOUT}
        options["start_new_session"] = True
        if prefix:
            words = [*prefix, sys.executable, *map(str, command)]
            self.process = subprocess.Popen(words, **options, stdout=subprocess.PIPE, text=True)
        else:
            self.process = start(*command, **options)
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def step(self) -> int:
        return self.steps[-1][1] if self.steps else 0

    def wait_until(self, condition, timeout: float = LONGEST) -> None:
        """Wait until condition(self) is true after a line. Otherwise end the job, and raise AssertionError
        with its output."""
        with self._news:
            is_true = self._news.wait_for(lambda: condition(self) or self.process.poll() is not None, timeout)
        if not (is_true and condition(self)):
            self.kill()
            raise AssertionError("\n".join(self.lines))

    def signal(self, number: int, *ranks: int) -> list[int]:
        """Send a signal to processes of the present generation, and return their ids."""
        pids = [self.pids[rank] for rank in ranks]
        for pid in pids:
            os.kill(pid, number)
        return pids

    def finish(self, timeout: float = LONGEST) -> int:
        """Wait for the end, and return the exit code."""
        try:
            code = self.process.wait(timeout)
        finally:
            self.kill()
        self._reader.join(LONGEST)
        return code

    def kill(self) -> None:
        """End the job and all its processes."""
        for pid in [*self.pids]:
            _kill(pid)
        _kill(self.process.pid)

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._news:
                if match := _STEP.match(line):
                    self.steps.append((time.monotonic(), int(match[1])))
                else:
                    self.lines.append(line.rstrip())
                if match := GENERATION.match(line):
                    self.generation, self.pids = int(match[1]), [*map(int, match[2].split())]
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def slow_job(path: Path, seconds: float, *lines: str) -> Path:
    """Write train_exact.py with a pause in each shard, and return its path: a step that mostly waits.

    lines: further lines of code in each shard, for example those of wait_for_file() and wait_for_members().
    """
    backward = "            loss.backward()\n"
    code = "".join(f"            {line}\n" for line in (f"__import__('time').sleep({seconds})", *lines))
    return changed("train_exact.py", path, (backward, backward + code))


def wait_for_file(step: int, path: Path) -> str:
    """Return a line of a job that waits, after `step` steps, until a file exists."""
    return _wait(step, f"os.path.exists({str(path)!r})")


def wait_for_members(step: int, count: int) -> str:
    """Return a line of a job that waits, after `step` steps, until it has `count` members or its members
    change after this step."""
    members = "__import__('common.elastic.members', fromlist=['this_process']).this_process()"
    return _wait(step, f"world_size >= {count} or {members}.due")


def _wait(steps: int, condition: str) -> str:
    return f"while step == {steps} and not ({condition}): __import__('time').sleep(0.05)"
