"""Read a run from its output folder: metrics.jsonl and starts.jsonl.

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

from common.ground.exits import BadInput
from common.ground.files import opener
from common.run import starts

METRICS = "metrics.jsonl"
_MOST_FIGURES = 40  # names in one run
_GREATEST = 10**100
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
    """

    path: str
    name: str
    figures: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    times: tuple[np.ndarray, np.ndarray] = (np.empty(0), np.empty(0))
    split: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[int, dict[str, float]] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
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
    return run


def _lines(run: Run) -> Iterator[dict]:
    """Yield the JSON objects of metrics.jsonl that have a step, one per line. Note the number of others."""
    path, good, bad = os.path.join(run.path, METRICS), 0, 0
    with (
        contextlib.suppress(FileNotFoundError),
        open(path, encoding="utf-8", errors="replace", opener=opener) as file,
    ):
        for line in file:
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):
                content = None
            if isinstance(content, dict) and 0 <= _number(content.get("step")) < math.inf:
                good += 1
                yield content
            else:
                bad += 1
    if not good:
        run.notes.append(f"{METRICS} is missing or empty: nothing was reported yet")
    if bad:
        run.notes.append(
            f"{METRICS}: {bad} lines could not be read (a killed job leaves the last one incomplete)"
        )


def _number(value: object) -> float:
    """Return the value as float; NaN if it is not a number; infinity if it is too large for a chart."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    if abs(value) > _GREATEST:
        return math.inf if value > 0 else -math.inf
    return float(value)


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
    for line in _lines(run):
        step, epoch, time = (_number(line.get(name)) for name in ("step", "epoch", "time"))
        number = int(epoch) if math.isfinite(epoch) else None
        if isinstance(line.get("receipt"), str):
            run.receipt = line["receipt"]
        for name, value in line.items():
            if name in _NO_FIGURES or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name not in columns and len(columns) == _MOST_FIGURES:
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
            before = run.split.get(number, [0.0] * len(SPLIT))
            run.split[number] = [sum(pair) for pair in zip(before, seconds, strict=True)]
        steps.append(step)
        times.append(time)
    run.times = np.asarray(steps), np.asarray(times)
    run.figures = {name: (np.asarray(x), np.asarray(y)) for name, (x, y) in columns.items()}
    if len(columns) == _MOST_FIGURES:
        run.notes.append(f"only the first {_MOST_FIGURES} figures are shown")
    for name, (_, values) in run.figures.items():
        if wrong := int((~np.isfinite(values)).sum()):
            run.notes.append(f"{name}: {wrong} of {len(values)} values are NaN or infinite (gaps)")
