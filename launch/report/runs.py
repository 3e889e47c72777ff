"""Read a run from its output folder: metrics.jsonl, starts.jsonl and checkpoints/.

Unreadable lines are skipped and noted. A folder with neither metrics.jsonl nor starts.jsonl is an error.
"""

import contextlib
import json
import math
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from common.checkpoint import files as checkpoint
from common.ground.exits import BadInput
from common.ground.files import opener
from common.run import starts

METRICS = "metrics.jsonl"
_MOST_FIGURES = 40  # names in one run
_NO_FIGURES = {"epoch", "step", "time", "data_time", "compute_time", "val_count"}
SPLIT = ("waiting for data", "computing", "evaluating and saving")


@dataclass
class Start:
    """A start of training.

    begun: start time of the process, if known
    lost_step, lost_time: the last report before this start, if its step is later than `step`
    """

    time: float
    step: float
    steps: float
    begun: float
    settings: dict
    environment: dict
    lost_step: float = math.nan
    lost_time: float = math.nan


@dataclass
class Run:
    """The content of an output folder.

    figures: name -> (steps, values), float64 [n] both; values may be NaN
    times: (steps, seconds of time.time()) of every line
    split: epoch -> seconds of each of SPLIT
    ends: epoch -> {name: last value}
    checkpoints: steps, the newest first
    """

    path: str
    name: str
    figures: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    times: tuple[np.ndarray, np.ndarray] = (np.empty(0), np.empty(0))
    split: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[int, dict[str, float]] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    receipt: str = ""
    notes: list[str] = field(default_factory=list)

    def last(self, name: str) -> float:
        """Return the last value of a figure; NaN if there is none."""
        return float(self.figures[name][1][-1]) if name in self.figures else math.nan

    @property
    def step(self) -> float:
        """Return the last reported step; 0 without one."""
        return float(self.times[0].max(initial=0))


def find_runs(path: str) -> list[str]:
    """Return the output folders in a folder, by name; the folder itself if it is one or has none."""
    if is_run(path) or not os.path.isdir(path):
        return [path]
    below = [os.path.join(path, name) for name in sorted(os.listdir(path))]
    return [each for each in below if is_run(each) and not os.path.islink(each)] or [path]


def is_run(path: str) -> bool:
    """Return whether a job has reported to this folder."""
    return any(os.path.exists(os.path.join(path, name)) for name in (METRICS, starts.FILE))


def read(path: str, name: str) -> Run:
    """Return the run whose output folder is `path`. Raises BadInput."""
    if not os.path.isdir(path):
        raise BadInput(f"no run at {path}: not a folder")
    if not is_run(path):
        raise BadInput(f"no run at {path}: neither {METRICS} nor {starts.FILE} is there")
    run = Run(path, name)
    try:
        run.starts = _read_starts(run)
        _read_metrics(run)
    except OSError as error:
        raise BadInput(f"cannot read {error.filename or path}: {error.strerror}") from error
    for each in checkpoint.list_newest_first(os.path.join(path, "checkpoints")):
        run.checkpoints.append(int(os.path.basename(each).removeprefix("step_").removesuffix(".pt")))
    return run


def _lines(run: Run) -> Iterator[dict]:
    """Yield the JSON objects of metrics.jsonl, one per line. Note other lines."""
    path, bad, whole, empty = os.path.join(run.path, METRICS), 0, True, True
    with (
        contextlib.suppress(FileNotFoundError),
        open(path, encoding="utf-8", errors="replace", opener=opener) as file,
    ):
        for line in file:
            empty = False
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):
                content = None
            whole = isinstance(content, dict)
            if whole:
                yield content
            else:
                bad += 1
    if empty:
        run.notes.append(f"{METRICS} is missing or empty: nothing was reported yet")
    if not whole:
        bad -= 1
        run.notes.append(f"{METRICS}: the last line is incomplete, as a killed job leaves it")
    if bad:
        run.notes.append(f"{METRICS}: lines that could not be read: {bad}")


def _number(value: object) -> float:
    """Return the value as float; NaN if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _object(value: object) -> dict:
    return value if isinstance(value, dict) else {}


def _read_starts(run: Run) -> list[Start]:
    """Return the starts in order, each once, beginning with the last one that did not resume."""
    history: list[Start] = []
    for line in starts.read(run.path):
        time, step = _number(line.get("time")), _number(line.get("step"))
        if not (math.isfinite(time) and math.isfinite(step)):
            continue
        if history and (history[-1].time, history[-1].step) == (time, step):
            continue
        laps = [seconds for seconds in map(_number, _object(line.get("laps")).values()) if seconds >= 0]
        settings, lost = line["settings"], _object(line.get("lost"))
        if isinstance(ignored := line.get("ignored"), list) and ignored:
            settings = settings | {"ignored arguments": " ".join(map(str, ignored))}
        if settings.get("resume") == "never":
            history, lost = [], {}
        start = Start(time, step, _number(line.get("steps")), time - sum(laps), settings, line["environment"])
        start.lost_step, start.lost_time = _number(lost.get("step")), _number(lost.get("time"))
        history.append(start)
    if not history:
        run.notes.append(f"no start in {starts.FILE}: settings, environment and restarts are unknown")
    return history


def _read_metrics(run: Run) -> None:
    """Fill the run from the lines of metrics.jsonl, whose starts it has already."""
    columns: dict[str, tuple[array, array]] = {}
    steps, times = array("d"), array("d")
    left_out, strange = set(), 0
    for line in _lines(run):
        step, epoch, time = (_number(line.get(name)) for name in ("step", "epoch", "time"))
        if not (math.isfinite(step) and step >= 0):
            strange += 1
            continue
        number = int(epoch) if math.isfinite(epoch) else None
        if isinstance(line.get("receipt"), str):
            run.receipt = line["receipt"]
        for name, value in line.items():
            if name in _NO_FIGURES or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name not in columns and len(columns) == _MOST_FIGURES:
                left_out.add(name)
                continue
            column = columns.setdefault(name, (array("d"), array("d")))
            column[0].append(step)
            column[1].append(_number(value))
            if number is not None:
                run.ends.setdefault(number, {})[name] = column[1][-1]
        if not math.isfinite(time):
            continue
        seconds = [_number(line.get("data_time")), _number(line.get("compute_time")), 0.0]
        if "val_loss" in line:  # the evaluation began at the previous line, or at a start after it
            began = [start.time for start in run.starts if start.time <= time]
            seconds = [0.0, 0.0, time - max([*times[-1:], *began], default=math.nan)]
        if number is not None and all(math.isfinite(each) and each >= 0 for each in seconds):
            run.split[number] = [
                a + b for a, b in zip(run.split.get(number, [0.0] * 3), seconds, strict=True)
            ]
        steps.append(step)
        times.append(time)
    run.times = np.asarray(steps), np.asarray(times)
    run.figures = {name: (np.asarray(x), np.asarray(y)) for name, (x, y) in columns.items()}
    if strange:
        run.notes.append(f"{METRICS}: lines without a step: {strange}")
    if left_out:
        run.notes.append(f"figures left out, more than {_MOST_FIGURES} names: {len(left_out)}")
    for name, (_, values) in run.figures.items():
        if wrong := int((~np.isfinite(values)).sum()):
            run.notes.append(f"{name}: {wrong} of {len(values)} values are NaN or infinite (gaps)")
