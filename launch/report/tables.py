"""Make the tables of a report: final figures, starts, epochs, differences, receipts."""

import datetime
import math
from typing import NamedTuple

import numpy as np

from bootfile.exact import digest_lines
from bootfile.ground.errors import BadInput
from bootfile.receipt.compare import compare_machines
from bootfile.receipt.reading import read
from bootfile.receipt.records import ReceiptError
from bootfile.receipt.steps import compare
from launch.explain import format_time
from launch.report.runs import SPLIT, UNITS, Run, Start

NONE = "–"
PERCENT = ".2%"
_MOST_ROWS = 200  # of a table of epochs
_USUAL = ("val_loss", "val_acc")
_SAME = ("output_dir",)  # differs for every run


class Row(NamedTuple):
    """A named row with one cell per run. differs: whether the known cells differ."""

    name: str
    cells: list[str]
    differs: bool


def make_final_rows(runs: list[Run]) -> list[Row]:
    """Return one row per figure with one cell per run. Rows without any value are omitted."""
    return [row for row in make_rows([_final(run) for run in runs]) if {*row.cells} != {NONE}]


def _final(run: Run) -> dict[str, str]:
    steps = run.starts[-1].steps if run.starts else math.nan
    state = f"{run.step:,.0f}" + (f" of {steps:,.0f}" if math.isfinite(steps) else "") + " steps"
    split = np.array(list(run.split.values())).reshape(-1, len(SPLIT)).sum(axis=0)
    evaluations = zip(*run.figures.get("val_acc", ((), ())), strict=True)
    accuracies = {step: accuracy for step, accuracy in evaluations if math.isfinite(accuracy)}
    best = max(accuracies, key=lambda step: accuracies[step], default=0)
    metrics = [name for name in run.figures if name.startswith("val_") and name not in _USUAL]
    rates = {unit: run.figures[name][1] for unit in UNITS if (name := f"{unit}_per_s") in run.figures}
    begun, reports = [start.begun for start in run.starts[:1]], [*run.times[1]]
    first = min(begun + reports[:1], default=math.nan)
    last = max(reports[-1:] + [start.time for start in run.starts], default=math.nan)
    return {
        "done": state + (" (finished)" if run.step == steps else ""),
        "epochs": str(max(run.ends)) if run.ends else NONE,
        "validation accuracy": format_number(run.last("val_acc"), PERCENT),
        "best validation accuracy": f"{accuracies[best]:.2%} at step {best:,.0f}" if accuracies else NONE,
        "validation loss": format_number(run.last("val_loss")),
        **{f"{name}, last": format_number(run.last(name)) for name in metrics},
        "training accuracy": format_number(run.last("acc"), PERCENT),
        "training loss": format_number(run.last("loss")),
        **{f"{unit} per second, median": format_number(np.nanmedian(rate)) for unit, rate in rates.items()},
        **{
            name: f"{format_duration(seconds)} ({seconds / split.sum():.1%})" if split.any() else NONE
            for name, seconds in zip(SPLIT, split, strict=True)
        },
        "set-up, all starts": format_duration(sum(start.time - start.begun for start in run.starts) or -1),
        "restarts": str(len(run.starts) - 1) if run.starts else NONE,
        "repeated steps": _repeated(run.starts[1:]) if len(run.starts) > 1 else NONE,
        "generations": format_number(run.last("generations")),
        "lost processes": format_number(run.last("lost_processes")),
        "seconds without a step": format_number(run.last("lost_seconds")),
        "useful share": format_number(run.last("useful_share"), PERCENT),
        "began": format_time(first),
        "from start to end": format_duration(last - first),
        "receipt": run.receipt or NONE,
    }


def _repeated(starts: list[Start]) -> str:
    """Return how many steps these starts did again that were reported before. At a URL the reports after the
    last upload may be lost."""
    least = "at least " if any("://" in str(start.settings.get("output_dir")) for start in starts) else ""
    steps = sum(max(0.0, start.lost_step - start.step) for start in starts if math.isfinite(start.lost_step))
    return f"{least}{steps:,.0f}"


def make_start_rows(runs: list[Run]) -> list[list[str]]:
    """Return rows of run, number of the start, time, first step, set-up, downtime, repeated steps,
    changes."""
    rows = []
    for run in runs:
        for number, (before, start) in enumerate(zip([None, *run.starts], run.starts, strict=False), 1):
            row = [run.name, str(number), format_time(start.begun), f"{start.step:,.0f}"]
            row.append(format_duration(start.time - start.begun))
            if before:
                reports = run.times[1][(run.times[1] >= before.time) & (run.times[1] < start.time)]
                stopped = np.nanmax([before.time, *reports[-1:], start.lost_time])
                changed = find_differences([each.settings | each.environment for each in (before, start)])
                changes = "; ".join(f"{each.name}: {' → '.join(each.cells)}" for each in changed)
                row += [format_duration(start.begun - stopped), _repeated([start])]
                row.append(changes or "nothing")
            rows.append(row + [NONE] * (8 - len(row)))
    return rows


def make_epoch_table(run: Run) -> tuple[list[str], list[list[str]]]:
    """Return (columns, rows) of one run. If there are more than _MOST_ROWS epochs, some are omitted."""
    numbers = sorted(run.ends.keys() | run.split.keys())
    numbers = numbers[:: max(1, math.ceil(len(numbers) / _MOST_ROWS))]
    names = list(dict.fromkeys(name for each in numbers for name in run.ends.get(each, {})))
    rows = []
    for each in numbers:
        ends, split = run.ends.get(each, {}), run.split.get(each, [math.nan] * len(SPLIT))
        forms = ((name, PERCENT if "acc" in name else ".5g") for name in names)
        row = [format_number(ends.get(name, math.nan), form) for name, form in forms]
        rows.append([str(each), *row, *map(format_duration, split)])
    return ["epoch", *names, *SPLIT], rows


def make_rows(columns: list[dict]) -> list[Row]:
    """Return a row for every key of these dictionaries. Empty dictionaries do not count as different."""
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        cells = [_cell(column[name]) if name in column else NONE for column in columns]
        known = {cell for cell, column in zip(cells, columns, strict=True) if column}
        rows.append(Row(str(name), cells, len(known) > 1))
    return rows


def find_differences(columns: list[dict]) -> list[Row]:
    """Return the rows of make_rows() that differ."""
    return [row for row in make_rows(columns) if row.differs and row.name not in _SAME]


def compare_receipts(runs: list[Run]) -> list[list[str]]:
    """Return rows of two runs and the verdict. Each run is compared with the first."""
    receipts, rows = {}, []
    for run in runs:
        try:
            receipts[run.name] = read(run.path)
        except BadInput as error:
            rows.append([run.name, NONE, str(error)])
    first = receipts.pop(runs[0].name, None)
    if first is not None:
        for name, other in receipts.items():
            try:
                verdict = compare(first, other)[1]
            except ReceiptError as error:
                verdict = str(error)
            cause = _compare_machines(runs[0], next(run for run in runs if run.name == name))
            rows.append([runs[0].name, name, f"{verdict}; {cause}" if cause else verdict])
    return rows


def _compare_machines(first: Run, second: Run) -> str:
    """Return the first difference between what computed the last states of two runs, in words; or ""."""
    lines = []
    for run in (first, second):
        states = digest_lines.read(run.path)
        if not states:
            return ""
        lines.append(states[max(states)])
    return compare_machines((first.name, second.name), *lines)


def _cell(value: object) -> str:
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 300 else text[:300] + "…"


def format_number(value: float, form: str = ".5g") -> str:
    """Return five digits, or a share as a percentage (form PERCENT); NONE for NaN."""
    return NONE if math.isnan(value) else format(value, form)


def format_duration(seconds: float) -> str:
    """Return "12.5 s" or "1:04:59", or NONE."""
    if not 0 <= seconds < 1e12:
        return NONE
    if seconds < 99.95:
        return f"{seconds:.{1 if seconds >= 9.995 else 2}f} s"
    return str(datetime.timedelta(seconds=round(seconds)))
