"""Read a run from its output folder: metrics.jsonl, starts.jsonl and checkpoints/.

Unreadable lines are skipped and noted. A folder with neither metrics.jsonl nor starts.jsonl is an error.
"""

import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from common import starts
from common.checkpoint import files as checkpoint
from common.exits import BadInput
from common.files import opener

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
    lost_step: float
    lost_time: float


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
    events: bool = False  # whether there are files of TensorBoard
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
    files = {file: os.path.join(path, file) for file in (METRICS, starts.FILE)}
    if not is_run(path):
        raise BadInput(f"no run at {path}: neither {METRICS} nor {starts.FILE} is there")
    run = Run(path, name)
    try:
        _fill(run, files)
    except OSError as error:
        raise BadInput(f"cannot read {error.filename or path}: {error.strerror}") from error
    return run


def _fill(run: Run, files: dict[str, str]) -> None:
    run.starts = _starts(_lines(files[starts.FILE], run))
    if not run.starts:
        run.notes.append(f"no start in {starts.FILE}: settings, environment and restarts are unknown")
    _Reader(run).read(_lines(files[METRICS], run))
    run.events = any(each.startswith("events.out.tfevents") for each in os.listdir(run.path))
    for each in checkpoint.list_newest_first(os.path.join(run.path, "checkpoints")):
        step = os.path.basename(each).removeprefix("step_").removesuffix(".pt")
        run.checkpoints.append(int(step))


def _lines(path: str, run: Run) -> Iterator[dict]:
    """Yield the JSON objects of a file, one per line. Note other lines."""
    bad, last, empty = 0, True, True
    try:
        with open(path, encoding="utf-8", errors="replace", opener=opener) as file:
            for line in file:
                empty, last = False, True
                try:
                    content = json.loads(line)
                except (ValueError, RecursionError):
                    content = None
                if isinstance(content, dict):
                    yield content
                else:
                    bad, last = bad + 1, False
    except FileNotFoundError:
        empty = True
    if empty and os.path.basename(path) == METRICS:
        run.notes.append(f"{METRICS} is missing or empty: nothing was reported yet")
    if not last:
        bad -= 1
        run.notes.append(f"{os.path.basename(path)}: the last line is incomplete, as a killed job leaves it")
    if bad:
        run.notes.append(f"{os.path.basename(path)}: lines that could not be read: {bad}")


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


def _starts(lines: Iterable[dict]) -> list[Start]:
    """Return the starts in order, each once, beginning with the last one that did not resume."""
    found: list[Start] = []
    for line in lines:
        time, step = _number(line.get("time")), _number(line.get("step"))
        if not (math.isfinite(time) and math.isfinite(step)):
            continue
        if found and (found[-1].time, found[-1].step) == (time, step):
            continue
        laps = [seconds for seconds in map(_number, _object(line.get("laps")).values()) if seconds >= 0]
        settings, lost = _object(line.get("settings")), _object(line.get("lost"))
        if isinstance(ignored := line.get("ignored"), list) and ignored:
            settings = settings | {"ignored arguments": " ".join(map(str, ignored))}
        start = Start(
            time, step, _number(line.get("steps")), time - sum(laps), settings,
            _object(line.get("environment")), _number(lost.get("step")), _number(lost.get("time")),
        )  # fmt: skip
        if settings.get("resume") == "never":
            found.clear()
            start.lost_step = start.lost_time = math.nan
        found.append(start)
    return found


class _Reader:
    """A reader that adds the lines of metrics.jsonl to a run."""

    def __init__(self, run: Run):
        self.run = run
        self._columns: dict[str, tuple[array, array]] = {}
        self._times = array("d"), array("d")
        self._before = math.nan  # time of the previous line
        self._start = 0  # number of starts before it
        self._left_out: set[str] = set()

    def read(self, lines: Iterable[dict]) -> None:
        strange = 0
        for line in lines:
            step = _number(line.get("step"))
            if math.isfinite(step) and step >= 0:
                self._add(step, line)
            else:
                strange += 1
        run = self.run
        run.times = np.asarray(self._times[0]), np.asarray(self._times[1])
        run.figures = {name: (np.asarray(x), np.asarray(y)) for name, (x, y) in self._columns.items()}
        if strange:
            run.notes.append(f"{METRICS}: lines without a step: {strange}")
        if self._left_out:
            run.notes.append(f"figures left out, more than {_MOST_FIGURES} names: {len(self._left_out)}")
        for name, (_, values) in run.figures.items():
            if wrong := int((~np.isfinite(values)).sum()):
                run.notes.append(f"{name}: {wrong} of {len(values)} values are NaN or infinite (gaps)")

    def _add(self, step: float, line: dict) -> None:
        if isinstance(line.get("receipt"), str):
            self.run.receipt = line["receipt"]
        epoch, time = _number(line.get("epoch")), _number(line.get("time"))
        number = int(epoch) if math.isfinite(epoch) else None
        for name, value in line.items():
            if name in _NO_FIGURES or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name not in self._columns and len(self._columns) == _MOST_FIGURES:
                self._left_out.add(name)
                continue
            steps, values = self._columns.setdefault(name, (array("d"), array("d")))
            steps.append(step)
            values.append(_number(value))
            if number is not None:
                self.run.ends.setdefault(number, {})[name] = values[-1]
        if not math.isfinite(time):
            return
        self._times[0].append(step)
        self._times[1].append(time)
        seconds = [_number(line.get("data_time")), _number(line.get("compute_time")), 0.0]
        if "val_loss" in line:
            seconds = [0.0, 0.0, time - self._since(time)]
        self._before = time
        if number is not None and all(math.isfinite(each) and each >= 0 for each in seconds):
            total = self.run.split.setdefault(number, [0.0, 0.0, 0.0])
            for place, each in enumerate(seconds):
                total[place] += each

    def _since(self, time: float) -> float:
        """Return the start time of the work that ended at `time`: the previous line, or a later start."""
        while self._start < len(self.run.starts) and self.run.starts[self._start].time <= time:
            start = self.run.starts[self._start].time
            self._before = start if math.isnan(self._before) else max(self._before, start)
            self._start += 1
        return self._before


def thin_out(steps: np.ndarray, values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most about `most` points, with the least and the greatest value of each interval."""
    if len(steps) <= most:
        return steps, values
    kept = {0, len(steps) - 1}
    for part in np.array_split(np.arange(len(steps)), max(1, most // 2)):
        finite = part[np.isfinite(values[part])]
        if len(finite):
            kept |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
        else:
            kept.add(int(part[0]))  # a gap stays a gap
    places = sorted(kept)
    return steps[places], values[places]


def average(steps: np.ndarray, values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the means of the finite values of `most` intervals, at their middles; NaN for an empty
    interval."""
    parts = np.array_split(np.arange(len(steps)), most)
    finite = [part[np.isfinite(values[part])] for part in parts]
    found = [values[part].mean() if len(part) else np.nan for part in finite]
    return np.array([steps[part].mean() for part in parts]), np.array(found)
