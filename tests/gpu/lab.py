"""Run stages with time limits. If a stage fails, its result has the reason, and the rest continues."""

import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from common.ground.files import ROOT

_GRACE = 5.0  # seconds from SIGTERM to SIGKILL
_POLL = 0.05  # seconds
_TAIL = 40  # last lines of a log that the result of a failed stage contains
_LEAST = 5.0  # seconds: a stage starts only if this much time remains


class Failed(Exception):
    """A stage cannot deliver its figures. The text is the reason."""


class Stage(NamedTuple):
    """A stage.

    name: of letters, digits and spaces
    seconds: time limit
    is_check: decides the exit code
    is_beside: runs at the same time as neighbouring stages with is_beside; it measures no times
    """

    name: str
    seconds: float
    function: Callable[["Run"], object]
    is_check: bool = False
    is_beside: bool = False


class Setting(NamedTuple):
    """The settings of all stages.

    is_small: a rehearsal on the CPU
    data: folder of Fashion-MNIST; None: the digits of scikit-learn
    scratch: folder for outputs
    logs, traces: folders for logs and for profiles
    env: environment of all commands
    gpus: number of GPUs
    gpu: name of the first one
    """

    is_small: bool
    data: str | None
    scratch: str
    logs: str
    traces: str
    env: dict[str, str]
    gpus: int
    gpu: str = "none"


class Results:
    """The results of the stages, in their order. report: called with all of them after each change, so that a
    row is written as soon as it is known."""

    def __init__(self, report: Callable[[list[dict]], object]):
        self.stages: list[dict] = []
        self._report = report
        self._lock = threading.Lock()

    def change(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function that changes a result, and report. Stages call it in their threads."""
        with self._lock:
            function(*arguments)
            self._report(self.stages)


class Run:
    """A running stage. It starts commands, waits for them, and notes rows."""

    def __init__(self, stage: Stage, setting: Setting, end: float, results: Results):
        self.setting, self.is_small = setting, setting.is_small
        self.result: dict[str, Any] = {
            "stage": stage.name, "is_check": stage.is_check, "seconds": 0.0, "is_over": False, "failed": "",
            "rows": [], "log": [],
        }  # fmt: skip
        self._results = results
        results.stages.append(self.result)
        self._name, self._begin = stage.name, time.monotonic()
        self._deadline = min(self._begin + stage.seconds, end)
        self._processes: list[subprocess.Popen] = []
        self._logs: dict[subprocess.Popen, str] = {}
        self._closed = threading.Event()

    def folder(self, name: str) -> str:
        """Return the path of an output folder of this stage."""
        return os.path.join(self.setting.scratch, f"{self._name}-{name}".replace(" ", "-"))

    def start(self, label: str, *command: str, **env: str) -> subprocess.Popen:
        """Start `python *command` in the repository's root; its output goes to the log of this label. Raises
        Failed after the time limit."""
        self._check_time()
        log = os.path.join(self.setting.logs, f"{self._name}-{label}.log".replace(" ", "-"))
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=self.setting.env | env, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        self._logs[process] = log
        if self._closed.is_set():
            self.close()
        return process

    def finish(self, process: subprocess.Popen, code: int = 0) -> str:
        """Wait, and return the output. Raises Failed for another exit code or at the time limit."""
        self.wait_until(lambda: process.poll() is not None)
        text = self.read(process)
        if process.returncode != code:
            lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
            raise Failed(f"exit code {process.returncode}: {lines[-1][:200]}")
        return text

    def call(self, label: str, *command: str, **env: str) -> str:
        """Run a command and return its output. Raises Failed."""
        return self.finish(self.start(label, *command, **env))

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until is_done() is true. Raises Failed at the time limit of the stage."""
        while not is_done():
            self.pause()

    def pause(self) -> None:
        """Wait for a moment. Raises Failed at the time limit of the stage."""
        self._check_time()
        time.sleep(_POLL)

    def _check_time(self) -> None:
        if self._closed.is_set():
            raise Failed("interrupted")
        if time.monotonic() > self._deadline:
            raise Failed(f"no end within {self._deadline - self._begin:.0f} s")

    def note(
        self,
        figure: str,
        value: float | str | Sequence[float],
        unit: str,
        aim: float | None = None,
        at_most: bool = False,
    ) -> None:
        """Note a figure, or the reason why it is missing.

        value: those of several rounds have a median and a range.
        aim: its target, at least or at most. A rehearsal has no targets.
        """
        spread = {}
        if isinstance(value, Sequence) and not isinstance(value, str):
            spread = {"n": len(value), "range": [min(value), max(value)]}
            value = statistics.median(value)
        met = None
        if aim is not None and not self.is_small:
            met = not isinstance(value, str) and (value <= aim if at_most else value >= aim)
        row = {"figure": figure, "value": value, "unit": unit, "aim": aim, "at_most": at_most, "met": met}
        row |= spread
        self._results.change(self.result["rows"].append, row)

    def check(self, figure: str, is_right: bool, detail: str = "") -> None:
        """Note whether a result is right. If it is wrong, the stage fails at its end."""
        value = detail or ("yes" if is_right else "no")
        row = {"figure": figure, "value": value, "met": is_right}
        self._results.change(self.result["rows"].append, row)

    def end(self, failed: str) -> None:
        """Note the end of the stage. failed: the reason, or ""."""
        end = {"is_over": True, "failed": failed, "seconds": round(time.monotonic() - self._begin, 1)}
        if failed:
            end["log"] = self.tail()
        self._results.change(self.result.update, end)

    def close(self) -> None:
        """End all processes of the stage. May be called from another thread."""
        self._closed.set()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
            deadline = time.monotonic() + _GRACE
            while number == signal.SIGTERM and time.monotonic() < deadline:
                if all(process.poll() is not None for process in self._processes):
                    break
                time.sleep(_POLL)
        for process in self._processes:
            process.wait()

    def tail(self) -> list[str]:
        """Return the last lines of the logs."""
        return [line for process in self._processes for line in self.read(process).splitlines()[-_TAIL:]]

    def read(self, process: subprocess.Popen) -> str:
        """Return the output of a process so far."""
        with open(self._logs[process], encoding="utf-8", errors="replace") as file:
            return file.read()


def longest(stages: list[Stage]) -> float:
    """Return the seconds of stages that all take their limits; neighbours that run together count once."""
    groups = itertools.groupby(stages, key=lambda stage: stage.is_beside)
    return sum((max if joint else sum)(each.seconds for each in group) for joint, group in groups)


def run_stages(
    stages: list[Stage], setting: Setting, end: float, report: Callable[[list[dict]], object]
) -> list[dict]:
    """Run all stages until `end`, by time.monotonic(), and return a result for each.

    A result: {"stage", "is_check", "seconds", "is_over", "failed": the reason or "", "rows", "log": its last
    lines if the stage failed}. report: is called with all results so far after each row and each stage.
    """
    results = Results(report)
    for is_beside, group in itertools.groupby(stages, key=lambda stage: stage.is_beside):
        several = list(group)
        for part in [several] if is_beside else [[stage] for stage in several]:
            _run_together(part, setting, end, results)
    return results.stages


def _run_together(stages: list[Stage], setting: Setting, end: float, results: Results) -> None:
    runs = [Run(stage, setting, end, results) for stage in stages]
    with ThreadPoolExecutor(len(stages)) as pool:
        futures = [pool.submit(_run_one, stage, run, end) for stage, run in zip(stages, runs, strict=True)]
        try:
            wait(futures)
        except BaseException:  # Ctrl-C, SIGTERM
            for run in runs:
                run.close()
            raise
    for future in futures:
        future.result()


def _run_one(stage: Stage, run: Run, end: float) -> None:
    failed = ""
    try:
        if time.monotonic() + _LEAST > end:
            raise Failed("skipped: no time is left")
        stage.function(run)
        rows = run.result["rows"]
        wrong = [f"{row['figure']}: {row['value']}" for row in rows if "aim" not in row and not row["met"]]
        failed = f"{len(wrong)} wrong, first {wrong[0]}" if wrong else ""
    except Failed as error:
        failed = str(error)
    except Exception as error:  # e.g. a figure is missing in an output; the other stages do not depend on it
        failed = f"{type(error).__name__}: {error}"
    finally:
        run.close()
    run.end(failed)
