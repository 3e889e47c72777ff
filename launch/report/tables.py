"""Make the tables of a report: final figures, starts, epochs, differences, receipts. cli.render_page() calls
these functions, and the templates of the page show their rows."""

import datetime
import json
import math
import os
from typing import Any, NamedTuple

import numpy as np

from bootfile.ground.errors import BadInput
from bootfile.ground.files import read_file
from bootfile.ground.results import CONFUSION
from bootfile.histories import describe_parent
from bootfile.receipt.compare import compare_states
from bootfile.receipt.reading import read
from bootfile.receipt.steps import compare
from launch.explain import format_time
from launch.report.runs import SPLIT, UNITS, Run, Start, in_words

NONE = "–"
PERCENT = ".2%"
_MOST_ROWS = 200  # of a table of epochs
_MOST_CLASSES = 50  # rows of a table of classes
_MOST_BYTES = 2**27  # the most of confusion.json that is read
_ORDERS = {True: "lowest", False: "highest"}  # by whether the lowest value is the best


class Row(NamedTuple):
    """A named row with one cell per run. differs: whether the known cells differ."""

    name: str
    cells: list[str]
    differs: bool


def make_final_rows(runs: list[Run]) -> list[Row]:
    """Return one row per figure with one cell per run. Rows without any value are omitted."""
    rows = make_rows(list(map(_final, runs)))
    return [row for row in rows if {*row.cells} != {NONE}]


def _final(run: Run) -> dict[str, str]:
    """Return the column of a run in the table of final figures: name -> cell, in the order of the rows."""
    figures_of_job: dict[str, str] = {}
    for name in run.figures:
        if name.startswith("val_") and name not in ("val_loss", "val_acc"):
            figures_of_job |= _describe_metric(run, name)
    rates = {
        f"{unit} per second, median": format_number(np.nanmedian(run.figures[f"{unit}_per_s"][1]))
        for unit in UNITS
        if f"{unit}_per_s" in run.figures
    }
    # a run that was killed has no end: its last report, or the begin of a start without one
    reports = run.times[1].tolist()
    first = min([*reports[:1], *(start.begun for start in run.starts[:1])], default=math.nan)
    last = max([*reports[-1:], *(start.time for start in run.starts)], default=math.nan)
    parent = run.starts[0].parent if run.starts else {}
    return {
        "done": _describe_state(run),
        "begins": describe_parent(parent, run.step).removeprefix("begins ") or NONE,
        "epochs": str(max(run.ends, default=NONE)),
        "validation accuracy": format_number(run.last("val_acc"), PERCENT),
        "best validation accuracy": find_best(run, "val_acc", False),
        "validation loss": format_number(run.last("val_loss")),
        "lowest validation loss": find_best(run, "val_loss", True),
        **figures_of_job,
        "training accuracy": format_number(run.last("acc"), PERCENT),
        "training loss": format_number(run.last("loss")),
        **rates,
        **_split_time(run),
        "lost to the slowest rank": format_number(run.lost, PERCENT),
        "set-up, all starts": format_duration(sum(start.time - start.begun for start in run.starts) or -1),
        "restarts": str(len(run.starts) - 1) if run.starts else NONE,
        "repeated steps": _count_repeated(run.starts[1:]),
        "generations": format_number(run.last("generations")),
        "lost processes": format_number(run.last("lost_processes")),
        "seconds without a step": format_number(run.last("lost_seconds")),
        "useful share": format_number(run.last("useful_share"), PERCENT),
        "began": format_time(first),
        "from start to end": format_duration(last - first),
        "receipt": run.receipt or NONE,
    }


def _describe_state(run: Run) -> str:
    """Return "40 of 100 steps", with "(finished)" if all are done."""
    steps = run.starts[-1].steps if run.starts else math.nan
    if not math.isfinite(steps):
        return f"{run.step:,.0f} steps"
    return f"{run.step:,.0f} of {steps:,.0f} steps{' (finished)' if run.step == steps else ''}"


def _find_choice(run: Run) -> tuple[str, bool]:
    """Return the figure that chooses best.pth, and whether its lowest value is the best."""
    order, _, metric = (run.starts[-1].best if run.starts else "").partition(" ")
    if order in ("lowest", "highest") and f"val_{metric}" in run.figures:
        return f"val_{metric}", order == "lowest"
    return ("val_acc", False) if "val_acc" in run.figures else ("val_loss", True)


def find_best(run: Run, name: str, is_lowest: bool) -> str:
    """Return the best value of a figure of the evaluations and its first step, in words."""
    evaluations = zip(*run.figures.get(name, ((), ())), strict=True)
    # a restart may have evaluated a step again
    values = {step: value for step, value in evaluations if math.isfinite(value)}
    if not values:
        return NONE
    # The first of several: a later evaluation with the same value did not replace best.pth.
    choose: Any = min if is_lowest else max
    best = choose(values, key=values.__getitem__)
    return f"{format_number(values[best], _form_of(name))} at step {best:,.0f}"


def _describe_metric(run: Run, name: str) -> dict[str, str]:
    """Return the rows of a metric of the job's own: its last value, and its best one. Only the job knows
    whether a low value is good: a metric that does not choose best.pth has both ends."""
    words, form, values = in_words(name), _form_of(name), run.figures[name][1]
    rows = {words: format_number(run.last(name), form)}
    chosen, is_lowest = _find_choice(run)
    if name == chosen:
        rows[f"{_ORDERS[is_lowest]} {words}"] = find_best(run, name, is_lowest)
    elif np.isfinite(values).any():
        ends = [format_number(end(values), form) for end in (np.nanmin, np.nanmax)]
        rows[f"{words}, all evaluations"] = " to ".join(ends)
    return rows


def _form_of(name: str) -> str:
    """Return the form of the values of a figure: a percentage for accuracies."""
    return PERCENT if "acc" in name or name == "val_top5" else ".5g"


def summarize(run: Run) -> str:
    """Return the state and the best result of a run, in words: the first lines of the page."""
    name, is_lowest = _find_choice(run)
    best = find_best(run, name, is_lowest)
    state = _describe_state(run)
    return state if best == NONE else f"{state}, {_ORDERS[is_lowest]} {in_words(name)} {best}"


def make_title(runs: list[Run]) -> str:
    """Return the title of the page: the job and its data, if all runs have the same, and their names."""
    jobs = set()
    for run in runs:
        words = [run.environment.get("job"), run.settings.get("dataset") or run.settings.get("data_url")]
        texts = [word for word in words if isinstance(word, str) and word]
        jobs.add(" on ".join(os.path.basename(word.rstrip("/")) for word in texts))
    names = ", ".join(run.name for run in runs)
    return names if len(jobs) > 1 or "" in jobs else f"{jobs.pop()}: {names}"


def make_class_table(run: Run) -> list[list[str]]:
    """Return rows of class, images, right, share, and the class it was taken for most often. They are from
    confusion.json of the last evaluation, the worst classes first; a job that counts no classes has none."""
    try:
        content = json.loads(read_file(os.path.join(run.path, CONFUSION), _MOST_BYTES))
        counts, right = content["count"], content["correct"]
        classes = content["classes"] or ()  # a loop of your own may name none
        names = classes if len(classes) == len(counts) else range(len(counts))
        matrix = content.get("matrix", [[]] * len(counts))  # with many classes the job writes none
        rows = []
        for place, (name, count, hits) in enumerate(zip(names, counts, right, strict=True)):
            # the class for which images of this one were taken most often, besides itself
            others = [other for other in range(len(matrix[place])) if other != place]
            most = max(others, key=matrix[place].__getitem__, default=place)
            taken = f"{names[most]} ({matrix[place][most]:,})" if others and count > hits else NONE
            share = hits / count if count else math.nan
            cells = [str(name), f"{count:,}", f"{hits:,}", format_number(share, PERCENT), taken]
            rows.append((share if count else math.inf, place, cells))  # classes without images come last
    except (OSError, ValueError, LookupError, TypeError):  # none, or of another program
        return []
    return [cells for _, _, cells in sorted(rows)[:_MOST_CLASSES]]


def _split_time(run: Run) -> dict[str, str]:
    """Return how the time of all epochs was spent: name of SPLIT -> seconds and share, in words."""
    split = np.array(list(run.split.values())).reshape(-1, len(SPLIT)).sum(axis=0)
    if not split.any():
        return dict.fromkeys(SPLIT, NONE)
    parts = zip(SPLIT, split, split / split.sum(), strict=True)
    return {name: f"{format_duration(seconds)} ({share:.1%})" for name, seconds, share in parts}


def _count_repeated(starts: list[Start]) -> str:
    """Return how many steps these starts did again. At a URL the last reports may be lost: "at least"."""
    repeated = sum(max(0.0, start.lost_step - start.step) for start in starts if start.lost_step > start.step)
    is_at_url = any("://" in str(start.settings.get("output_dir")) for start in starts)
    return f"{'at least ' if is_at_url else ''}{repeated:,.0f}" if starts else NONE


def make_start_rows(runs: list[Run]) -> list[list[str]]:
    """Return rows of run, number of the start, time, the step after which it begins, set-up, downtime,
    repeated steps, changes, and how it ended."""
    rows = []
    for run in runs:
        for number, start in enumerate(run.starts):
            set_up = format_duration(start.time - start.begun)
            row = [run.name, str(number + 1), format_time(start.begun), f"{start.step:,.0f}", set_up]
            changes = _describe_restart(run, run.starts[number - 1], start) if number else [NONE] * 3
            rows.append([*row, *changes, start.end or NONE])
    return rows


def _describe_restart(run: Run, before: Start, start: Start) -> list[str]:
    """Return downtime, repeated steps, and changed settings of a start after another one."""
    reports = run.times[1][(run.times[1] >= before.time) & (run.times[1] < start.time)]
    # Steps after the last checkpoint are lost, but the process lived until it reported them.
    stopped = np.nanmax([before.time, *reports[-1:], start.lost_time])
    changed = find_differences([before.settings | before.environment, start.settings | start.environment])
    changes = "; ".join(f"{change.name}: {' → '.join(change.cells)}" for change in changed)
    return [format_duration(start.begun - stopped), _count_repeated([start]), changes or "nothing"]


def make_epoch_table(run: Run) -> tuple[list[str], list[list[str]]]:
    """Return (columns, rows) of one run. If there are more than _MOST_ROWS epochs, some are omitted."""
    numbers = sorted(run.ends.keys() | run.split.keys())
    numbers = numbers[:: max(1, math.ceil(len(numbers) / _MOST_ROWS))]
    # in the order in which epochs have them first
    names = [*dict.fromkeys(name for number in numbers for name in run.ends.get(number, {}))]
    rows = []
    for number in numbers:
        ends = run.ends.get(number, {})
        figures = [format_number(ends.get(name, math.nan), _form_of(name)) for name in names]
        split = run.split.get(number, [math.nan] * len(SPLIT))
        rows.append([str(number), *figures, *map(format_duration, split)])
    return ["epoch", *names, *SPLIT], rows


def make_rows(columns: list[dict]) -> list[Row]:
    """Return a row for every key. Empty columns, of runs whose settings were lost, count as equal."""
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        cells = [_cell(column[name]) if name in column else NONE for column in columns]
        known = {cell for cell, column in zip(cells, columns, strict=True) if column}
        rows.append(Row(str(name), cells, len(known) > 1))
    return rows


def find_differences(columns: list[dict]) -> list[Row]:
    """Return the rows of make_rows() that differ, but output_dir, which differs for every run."""
    return [row for row in make_rows(columns) if row.differs and row.name != "output_dir"]


def compare_receipts(runs: list[Run]) -> list[list[str]]:
    """Return rows of two runs and the lines of `launch receipt` about their data and states. Each run is
    compared with the first one whose receipt can be read; a run without one has a row with the reason."""
    receipts = []  # (run, its receipt)
    rows = []
    for run in runs:
        try:
            receipts.append((run, read(run.path)))
        except BadInput as error:
            rows.append([run.name, NONE, str(error), NONE])
    for other, receipt in receipts[1:]:
        first, receipt_of_first = receipts[0]
        try:
            verdict = compare(receipt_of_first, receipt)[1]
        except BadInput as error:
            verdict = str(error)
        rows.append([first.name, other.name, verdict, _compare_states(first, other)])
    return rows


def _compare_states(first: Run, other: Run) -> str:
    """Return how the state of a run differs from that of the first one, in words."""
    try:
        text = compare_states(first.path, other.path)[1]
    except BadInput as error:  # a damaged line: the page shows the rest
        text = str(error)
    # The page names runs by short names. The longer path comes first: it may begin with the other one.
    for run in sorted((first, other), key=lambda run: len(run.path), reverse=True):
        text = text.replace(run.path, run.name)
    return text


def _cell(value: object) -> str:
    """Return a value of the settings or of the environment as text, as an option of a command has it."""
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    return text[:300] + "…" if len(text) > 300 else text  # a list of files, for example


def format_number(value: float, form: str = ".5g") -> str:
    """Return five digits, or a share as a percentage (form PERCENT); NONE for NaN."""
    return NONE if math.isnan(value) else format(value, form)


def format_duration(seconds: float) -> str:
    """Return "12.5 s" or "1:04:59", or NONE."""
    if not 0 <= seconds < 1e12:
        return NONE
    if seconds < 99.95:
        return f"{seconds:.1f} s" if seconds >= 9.995 else f"{seconds:.2f} s"  # what rounds to 10.0
    return str(datetime.timedelta(seconds=round(seconds)))
