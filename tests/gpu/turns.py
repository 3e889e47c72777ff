"""Compare trainings that run in turns: each is a process that is stopped while another one is measured.

So a comparison needs one start and one compilation of each, the starts take place at the same time, and the
turns of a round follow each other. A training is a job, or a loop of tests/gpu/plain.py: it writes
metrics.jsonl, a line for each report. A process that is stopped (SIGSTOP) computes nothing, but keeps its
memory of the GPU: all of them have to fit.
"""

import contextlib
import os
import signal
from typing import NamedTuple

from tests.benchmarks import jobs
from tests.gpu.lab import Failed, Run

_WARM = 2  # first reports, in which the loop compiles and its loader starts
_REPORTS = 2  # least reports of a turn; the one before them begins in an earlier turn, and is dropped
_SECONDS = 1.5  # least seconds of a turn


class Turn(NamedTuple):
    """The figures of a turn: images or tokens in a second, the share of waiting for data, and memory."""

    rate: float
    waiting: float
    memory_gb: float


class Training:
    """A training that runs only in its turns. command: a job; its --output_dir, its last words, is added."""

    def __init__(self, run: Run, label: str, *command: str):
        self._run = run
        self._output = run.folder(label)
        self._process = run.start(label, *command, "--output_dir", self._output)
        self.failed = ""
        self.turns: list[Turn] = []

    @property
    def reports(self) -> list[dict]:
        """All reports on training steps so far."""
        return [line for line in jobs.read_metrics(self._output) if "loss" in line]

    def has(self, count: int) -> bool:
        """Return whether it has as many reports. If it has ended, note why in `failed`, and return true."""
        if self._process.poll() is not None and not self.failed:
            lines = [line for line in self._run.read(self._process).splitlines() if line.strip()]
            self.failed = f"exit code {self._process.returncode}: {(lines or ['no output'])[-1][:200]}"
        return bool(self.failed) or len(self.reports) >= count

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its processes, if it has not ended."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def take_turn(self, seconds: float) -> None:
        """Let it run for a turn, and add the figures."""
        first = len(self.reports) + 1
        self.signal(signal.SIGCONT)
        self._run.wait_until(
            lambda: self.has(first + _REPORTS) and (self.failed or _duration(self.reports[first:]) >= seconds)
        )
        self.signal(signal.SIGSTOP)
        if self.failed:
            return
        reports = self.reports[first:]
        waited = sum(report["data_time"] for report in reports)
        memory = reports[-1]["memory_mb"] / 1000
        self.turns.append(Turn(_count(reports) / _duration(reports), waited / _duration(reports), memory))


def compare(run: Run, commands: dict[str, tuple[str, ...]], rounds: int) -> dict[str, list[Turn]]:
    """Return the turns of each training by its name, those of a round one after the other. A training that
    fails has a row with the reason, and is left out. Raises Failed if none is left, or if the time limit of
    the stage comes before the end of a round."""
    trainings = {name: Training(run, name, *command) for name, command in commands.items()}
    waiting = list(trainings.values())

    def have_begun() -> bool:
        for training in [each for each in waiting if each.has(_WARM)]:
            training.signal(signal.SIGSTOP)  # the others compile meanwhile
            waiting.remove(training)
        return not waiting

    run.wait_until(have_begun)
    try:
        for number in range(rounds):
            for training in list(trainings.values())[:: -1 if number % 2 else 1]:
                if not training.failed:
                    training.take_turn(0 if run.is_small else _SECONDS)
    except Failed:  # at the time limit: whole rounds count
        whole = min(len(training.turns) for training in trainings.values() if not training.failed)
        if not whole:
            raise
        for training in trainings.values():
            del training.turns[whole:]
    for name, training in trainings.items():
        training.signal(signal.SIGKILL)  # a stopped process would not end by SIGTERM
        if training.failed:
            run.note(name, training.failed, "")
    if all(training.failed for training in trainings.values()):
        raise Failed("no training has run")
    return {name: training.turns for name, training in trainings.items() if not training.failed}


def _duration(reports: list[dict]) -> float:
    return sum(report["data_time"] + report["compute_time"] for report in reports)


def _count(reports: list[dict]) -> float:
    """Return the images or tokens of these reports."""
    [unit] = [name for name in reports[0] if name.endswith("_per_s")]
    return sum(report[unit] * _duration([report]) for report in reports)
