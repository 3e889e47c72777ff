"""Read a run from its output folder: metrics.jsonl and starts.jsonl. A job may still write to it meanwhile.
Unreadable lines are skipped and noted. A folder with neither metrics.jsonl nor starts.jsonl is an error."""

import math
import os
import re
from dataclasses import dataclass, field

import numpy as np

from bootfile.ground.errors import BadInput
from bootfile.histories import parent_of
from bootfile.records import METRICS, STARTS, read_counted, read_starts
from common.run import starts

_MOST_FIGURES = 40  # names in one run
_GREATEST = 10**100
_NO_FIGURES = {"epoch", "step", "time", "data_time", "compute_time", "val_count"}
UNITS = ("images", "samples", "tokens")  # the figures are <unit>_per_s
SPLIT = ("waiting for data", "computing", "evaluating and saving")
_WORDS = {
    "loss": "training loss",
    "acc": "training accuracy",
    "val_acc": "validation accuracy",
    "val_top5": "validation top-5 accuracy",
    "val_class_acc": "validation accuracy, mean of the classes",
    "val_f1": "validation F1",
    "lr": "learning rate",
    "memory_mb": "peak memory of rank 0 in MB",
    "generations": "generations of processes",
    "lost_processes": "lost processes",
    "lost_seconds": "seconds without a step",
    "useful_share": "useful share of the time",
}


def in_words(figure: str) -> str:
    """Return the name of a figure of metrics.jsonl as the page shows it."""
    return _WORDS.get(figure, re.sub("^val_", "validation ", figure))


@dataclass
class Start:
    """A start of training.

    begun: start time of the process, if known
    parent: the step of another run at which it begins (parent_of), {} for one that begins with step 1
    best: the metric that chooses best.pth, such as "lowest rmse"; "" for the accuracy, or the loss
    lost_step, lost_time: the last report before this start, if its step is later than `step`; else NaN
    end: how it ended, in words; "" if that is not known, or it may still run
    """

    time: float
    step: float
    steps: float
    begun: float
    settings: dict
    environment: dict
    lost_step: float
    lost_time: float
    parent: dict = field(default_factory=dict)
    best: str = ""
    end: str = ""


@dataclass
class Run:
    """The content of an output folder.

    figures: name -> (steps, values), float64 [n] both; values may be NaN
    times: steps and seconds of time.time() of every line, float64 [2, n]
    split: epoch -> seconds of each of SPLIT
    ends: epoch -> {name: last value}
    receipt: the last one that was reported
    lost: the share of the time that was lost to the slowest rank; NaN if it is not known
    notes: what is missing or damaged
    """

    path: str
    name: str
    figures: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    times: np.ndarray = field(default_factory=lambda: np.empty((2, 0)))
    split: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[int, dict[str, float]] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    receipt: str = ""
    lost: float = math.nan
    notes: list[str] = field(default_factory=list)

    def last(self, name: str) -> float:
        """Return the last value of a figure; NaN if there is none."""
        return float(self.figures[name][1][-1]) if name in self.figures else math.nan

    @property
    def settings(self) -> dict:
        """Return the settings of the last start; {} if they are not known."""
        return self.starts[-1].settings if self.starts else {}

    @property
    def environment(self) -> dict:
        """Return the environment of the last start; {} if it is not known."""
        return self.starts[-1].environment if self.starts else {}

    @property
    def step(self) -> float:
        """Return the last reported step; 0 without one."""
        return float(self.times[0].max(initial=0))


def find_runs(path: str) -> list[str]:
    """Return the output folders in a folder, by name; the folder itself if it is one or has none."""
    below = []
    if os.path.isdir(path) and not is_run(path):
        below = [os.path.join(path, name) for name in sorted(os.listdir(path))]
    return [run for run in below if is_run(run) and not os.path.islink(run)] or [path]


def is_run(path: str) -> bool:
    """Return whether a job has reported to this folder."""
    return any(os.path.exists(os.path.join(path, name)) for name in (METRICS, STARTS))


def read(path: str, name: str) -> Run:
    """Return the run whose output folder is `path`, as far as it has reported. Raises BadInput."""
    if not is_run(path):
        raise BadInput(f"no run at {path}: neither {METRICS} nor {STARTS} is there")
    run = Run(path, name)
    run.starts = _read_starts(run)
    _read_metrics(run)
    return run


def _numbers(value: object) -> dict[str, float]:
    """Return the numbers in an object of JSON; NaN for those that are too large for a chart or a float."""
    items = value.items() if isinstance(value, dict) else ()
    numbers = {name: number for name, number in items if type(number) in (int, float)}
    return {name: float(number) if abs(number) <= _GREATEST else math.nan for name, number in numbers.items()}


def _read_starts(run: Run) -> list[Start]:
    """Return the starts in order, each once, beginning with the last one that did not resume."""
    history: list[Start] = []
    recorded = starts.read_ends(run.path)
    for line in read_starts(run.path):
        numbers = {"time": math.nan, "steps": math.nan} | _numbers(line)
        time, step = numbers["time"], numbers["step"]
        is_known = bool(history) and (history[-1].time, history[-1].step) == (time, step)
        if is_known or not math.isfinite(time + step):
            continue
        settings = line["settings"]
        lost = _numbers(line.get("lost"))
        if settings.get("resume") == "never":  # another training in the same folder began here
            history.clear()
            lost.clear()
        # the process began earlier, by the seconds of the laps before its training
        set_up = sum(seconds for seconds in _numbers(line.get("laps")).values() if seconds >= 0)
        code = {"code": str(line["code"])} if line.get("code") else {}
        start = Start(
            time=time,
            step=step,
            steps=numbers["steps"],
            begun=time - set_up,
            settings=settings,
            environment=line["environment"] | code,
            lost_step=lost.get("step", math.nan),
            lost_time=lost.get("time", math.nan),
            parent=parent_of([line]),
            best=str(line.get("best") or ""),
            end=recorded.get(time, ""),
        )
        history.append(start)
    if not history:
        run.notes.append(f"no start in {STARTS}: settings, environment and restarts are unknown")
    elif history[-1].end == starts.KILLED:
        history[-1].end = ""  # it may still run
    return history


def _read_metrics(run: Run) -> None:
    """Fill the run from the lines of metrics.jsonl; its starts are known. Raises BadInput."""
    # a job that has not reported yet has no file: the page shows its settings
    objects, damaged = read_counted(run.path, METRICS)
    lines = [numbers for numbers in map(_numbers, objects) if numbers.get("step", math.nan) >= 0]
    receipts = [line["receipt"] for line in objects if isinstance(line.get("receipt"), str)]
    run.receipt = receipts[-1] if receipts else ""
    if not lines:
        run.notes.append(f"{METRICS} is missing or empty: nothing was reported yet")
    bad = damaged + len(objects) - len(lines)
    if bad:
        run.notes.append(
            f"{METRICS}: {bad} lines could not be read (a killed job leaves the last one incomplete)"
        )
    # in the order in which the job has reported them first
    names = [*dict.fromkeys(name for line in lines for name in line if name not in _NO_FIGURES)]
    if len(names) > _MOST_FIGURES:  # a loop may report a name for each layer
        run.notes.append(f"only the first {_MOST_FIGURES} figures are shown")
    for name in names[:_MOST_FIGURES]:
        steps, values = np.array([(line["step"], line[name]) for line in lines if name in line]).T
        run.figures[name] = steps, values
        if wrong := np.isnan(values).sum():
            run.notes.append(f"{name}: {wrong} of {len(values)} values are NaN or infinite (gaps)")
    lost = [_numbers(line.get("ranks")).get("lost", math.nan) for line in objects]
    run.lost = next(filter(math.isfinite, reversed(lost)), math.nan)
    _read_times(run, lines)


def _read_times(run: Run, lines: list[dict[str, float]]) -> None:
    """Fill times, ends and split of the run, whose starts and figures are known, from its lines in order."""
    times: list[tuple[float, float]] = []  # (step, time) of the lines before
    for line in lines:
        time, epoch = line.get("time", math.nan), line.get("epoch", math.nan)
        seconds = [line.get("data_time", math.nan), line.get("compute_time", math.nan), 0.0]  # as in SPLIT
        if "val_loss" in line:  # the evaluation began at the previous line, or at a start after it
            begins = [start.time for start in run.starts if start.time <= time]
            begins += [before for _, before in times[-1:]]
            seconds = [0.0, 0.0, time - max(begins, default=math.nan)]
        if math.isfinite(epoch):
            known = run.ends.setdefault(int(epoch), {})
            known |= {name: value for name, value in line.items() if name in run.figures}
            # A clock that was set back gives negative times, which say nothing.
            if math.isfinite(time + sum(seconds)) and min(seconds) >= 0:
                before = run.split.get(int(epoch), [0.0] * len(SPLIT))
                run.split[int(epoch)] = [sum(pair) for pair in zip(before, seconds, strict=True)]
        if math.isfinite(time):
            times.append((line["step"], time))
    run.times = np.array(times).reshape(-1, 2).T
