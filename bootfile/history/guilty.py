"""Find the samples of a step that made a spike, by computing the steps after it without parts of its batch.

A replay computes the steps from the last state before the step to some steps after it, without some samples
in the batch of the step. Its measure is the mean loss of the steps after it. With all samples it has the
spike; without the whole step it has not. The search is for the shortest begin of the batch without which the
spike is gone: the last sample of it is guilty. For one guilty sample these are log2(batch) + 3 replays.
"""

import dataclasses
import math
import os
import tempfile
from collections.abc import Sequence

import numpy as np

from bootfile.ground.errors import BadInput, print_line
from bootfile.ground.numbers import counted
from bootfile.history import compute
from bootfile.history.parent import Parent
from bootfile.receipt.recorded_run import Run
from bootfile.records import METRICS, read_lines

_SPIKE = 1.1  # a mean loss that is larger than without the step by this factor
_MOST = 8  # samples that are looked for


@dataclasses.dataclass(frozen=True)
class Result:
    """What a search has found. ids: the guilty samples, none if the step made no spike. is_whole: whether the
    spike is gone without them. before: the mean loss with the whole batch. without_step: without the step.
    after: without the guilty samples. replays: their number. first, last: the steps of the mean loss."""

    ids: list[int]
    is_whole: bool
    before: float
    without_step: float
    after: float
    replays: int
    first: int
    last: int


class Search:
    """A search in the batch of a step.

    folder: of the run, which is only read. step: from 1. ahead: the number of steps after it whose loss is
    measured. job: the script, if it is not where it was. processes: their number, if it may be another one.
    options: words for the job. Raises BadInput.
    """

    def __init__(
        self,
        folder: str,
        step: int,
        ahead: int = 3,
        job: str | None = None,
        processes: int | None = None,
        options: Sequence[str] = (),
    ):
        run = Run(folder)
        run.check(step, np.zeros(0, np.int64))  # whether it exists, and has samples
        self._step = step
        self._last = min(step + ahead, run.last)
        if self._last == step:
            raise BadInput(f"--guilty: step {step} is the last one of {folder}: no loss comes after it")
        self._ids = run.ids(run.sampler(step), step)
        self._parent = Parent(folder, self._last, step - 1)
        self._script = job or str(self._parent.start.get("script", ""))
        if not os.path.isfile(self._script):
            raise BadInput(f"{self._script}: no such file: name the job of the run with --job FILE")
        self._processes = processes or self._parent.world_size
        # a report after each step: the measure needs the loss of every step
        self._options = [*options, "--report_every=1"]
        self._place = ""  # the folder of the replays
        self._replays = 0

    def find(self) -> Result:
        """Make the replays, print a line for each, and return the guilty samples. Raises BadInput."""
        print_line(
            f"each replay computes the steps {self._parent.state + 1}-{self._last}; its measure is the mean "
            f"loss of the steps {self._step + 1}-{self._last}"
        )
        with tempfile.TemporaryDirectory(prefix="bootfile-guilty-") as self._place:
            # the two ends of the search: the spike, and what is left of it without the whole step
            before = self._measure([])
            without_step = self._measure(self._ids.tolist())
            after = before
            guilty: list[int] = []
            end = len(self._ids)
            limit = _find_limit(before, without_step)
            if before > _SPIKE * without_step:
                while len(guilty) < _MOST and after > limit:
                    # a guilty sample ends the shortest begin; another one can only be before it
                    end = self._find_end(end, guilty, limit)
                    guilty.append(int(self._ids[end - 1]))
                    after = self._measure(guilty)
                    end -= 1
        is_whole = bool(guilty) and after <= limit
        first = self._step + 1
        return Result(guilty, is_whole, before, without_step, after, self._replays, first, self._last)

    def _find_end(self, end: int, guilty: list[int], limit: float) -> int:
        """Return the length of the shortest begin of the batch without which, and without the samples that
        are known to be guilty, the spike is gone. end: a length without which it is gone."""
        begin = 0  # a length without which it is still there
        while end - begin > 1:
            middle = (begin + end) // 2
            if self._measure([*self._ids[:middle].tolist(), *guilty]) > limit:
                begin = middle
            else:
                end = middle
        return end

    def _measure(self, ids: list[int]) -> float:
        """Return the mean loss of the steps after the step without these samples in it; infinity if it is not
        finite. Raises BadInput."""
        self._replays += 1
        folder = os.path.join(self._place, f"replay-{self._replays}")
        variables = {}
        if ids:
            # only in the batch of this step: in all others the run has these samples as before
            path = f"{folder}.ids"
            with open(path, "w", encoding="ascii") as file:
                file.write("".join(f"{id}\n" for id in ids))
            variables = {compute.WITHOUT_IN: f"{self._step}:{path}"}
        compute.compute(self._parent, folder, self._script, self._processes, self._options, variables)
        loss = self._read_loss(folder)
        print_line(
            f"replay {self._replays}: without {counted(len(ids), 'sample')} of step {self._step}: {loss:.6g}"
        )
        return loss

    def _read_loss(self, folder: str) -> float:
        """Return the mean of the losses that a replay has reported for the steps after the step."""
        losses = {}
        for line in read_lines(folder, METRICS):
            step = line.get("step")
            if type(step) is int and self._step < step <= self._last and "lr" in line:
                losses[step] = line.get("loss")
        values = [value for value in losses.values() if isinstance(value, int | float)]
        if len(values) < self._last - self._step or not all(map(math.isfinite, values)):
            return math.inf
        return sum(values) / len(values)


def _find_limit(before: float, without_step: float) -> float:
    """Return the mean loss above which the spike is there: without one of two guilty samples, which share the
    spike, it still is. Their mean would be about as much, so it is the geometric one."""
    if math.isinf(before):
        return 2 * without_step
    if without_step <= 0:
        return (before + without_step) / 2
    return math.sqrt(before * without_step)


def describe(result: Result, folder: str, step: int) -> list[str]:
    """Return the result in lines."""
    steps = f"the mean loss of the steps {result.first}-{result.last}"
    if not result.ids:
        line = (
            f"step {step} made no spike: {steps} is {result.before:.6g}, and without step {step} "
            f"{result.without_step:.6g} (a spike is {_SPIKE:g} times as much)"
        )
        return [line]
    name = "samples "
    those = "them"
    if len(result.ids) == 1:
        name = "sample "
        those = "it"
    name += ", ".join(map(str, sorted(result.ids)))
    text = f"{steps} is {result.before:.6g}, {result.after:.6g} without {those}"
    text += f", and {result.without_step:.6g} without step {step}"
    verdict = f"guilty: {name}: {text} ({result.replays} replays)"
    if not result.is_whole:
        verdict = f"not all found: {name} and others of step {step}: {text} ({result.replays} replays)"
    return [verdict, f"a run that never had them: python -m launch replay {folder} --without IDS_FILE"]
