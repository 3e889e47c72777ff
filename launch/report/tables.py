"""Make the tables of a report: final figures, starts, epochs, differences, receipts.

cli.render_page() calls these functions, and the templates of the page show their rows.
"""

import contextlib
import datetime
import json
import math
import os
from typing import Any, NamedTuple

import numpy as np

from bootfile.ground.errors import BadInput
from bootfile.ground.files import read_file
from bootfile.ground.results import CONFUSION
from bootfile.receipt.compare import compare_states
from bootfile.receipt.reading import read
from bootfile.receipt.records import ReceiptError
from bootfile.receipt.steps import compare
from bootfile.records import describe_parent
from launch.explain import format_time
from launch.report.runs import SPLIT, UNITS, Run, Start, in_words

NONE = "–"
PERCENT = ".2%"
_MOST_ROWS = 200  # of a table of epochs
_MOST_CLASSES = 50  # rows of a table of classes
_MOST_BYTES = 2**27  # the most of confusion.json that is read
_USUAL = ("val_loss", "val_acc")
_ORDERS = {True: "lowest", False: "highest"}  # by whether the lowest value is the best
_SAME = ("output_dir",)  # differs for every run


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
    cells = {"done": _describe_state(run), "begins": NONE, "epochs": NONE}
    if run.starts and run.starts[0].parent:
        cells["begins"] = describe_parent(run.starts[0].parent, run.step).removeprefix("begins ")
    if run.ends:
        cells["epochs"] = str(max(run.ends))
    cells["validation accuracy"] = format_number(run.last("val_acc"), PERCENT)
    cells["best validation accuracy"] = find_best(run, "val_acc", False)
    cells["validation loss"] = format_number(run.last("val_loss"))
    cells["lowest validation loss"] = find_best(run, "val_loss", True)
    for name in run.figures:
        if name.startswith("val_") and name not in _USUAL:
            cells |= _describe_metric(run, name)
    cells["training accuracy"] = format_number(run.last("acc"), PERCENT)
    cells["training loss"] = format_number(run.last("loss"))
    for unit in UNITS:
        if f"{unit}_per_s" in run.figures:
            rate = run.figures[f"{unit}_per_s"][1]
            cells[f"{unit} per second, median"] = format_number(np.nanmedian(rate))
    cells |= _split_time(run)
    cells["lost to the slowest rank"] = format_number(run.lost, PERCENT)
    set_up = sum(start.time - start.begun for start in run.starts)
    cells["set-up, all starts"] = format_duration(set_up or -1)  # NONE without starts
    # Without starts.jsonl a run has no known start: it may have had restarts.
    cells["restarts"] = NONE
    if run.starts:
        cells["restarts"] = str(len(run.starts) - 1)
    cells["repeated steps"] = NONE
    if len(run.starts) > 1:
        cells["repeated steps"] = _repeated(run.starts[1:])
    cells["generations"] = format_number(run.last("generations"))
    cells["lost processes"] = format_number(run.last("lost_processes"))
    cells["seconds without a step"] = format_number(run.last("lost_seconds"))
    cells["useful share"] = format_number(run.last("useful_share"), PERCENT)
    # a run that was killed has no end: its last report, or the begin of a start without one
    reports = [*run.times[1]]
    begins = reports[:1]
    ends = reports[-1:]
    for start in run.starts:
        ends.append(start.time)
    if run.starts:
        begins.append(run.starts[0].begun)
    first = min(begins, default=math.nan)
    last = max(ends, default=math.nan)
    cells["began"] = format_time(first)
    cells["from start to end"] = format_duration(last - first)
    cells["receipt"] = run.receipt or NONE
    return cells


def _describe_state(run: Run) -> str:
    """Return "40 of 100 steps", with "(finished)" if all are done."""
    steps = run.starts[-1].steps if run.starts else math.nan
    state = f"{run.step:,.0f}"
    if math.isfinite(steps):
        state += f" of {steps:,.0f}"
    state += " steps"
    if run.step == steps:
        state += " (finished)"
    return state


def choice_of(run: Run) -> tuple[str, bool]:
    """Return the figure that chooses best.pth, and whether its lowest value is the best."""
    named = run.starts[-1].best if run.starts else ""
    order, _, metric = named.partition(" ")
    if order in ("lowest", "highest") and f"val_{metric}" in run.figures:
        return f"val_{metric}", order == "lowest"
    if "val_acc" in run.figures:
        return "val_acc", False
    return "val_loss", True


def find_best(run: Run, name: str, is_lowest: bool) -> str:
    """Return the best value of a figure of the evaluations and its first step, in words."""
    evaluations = zip(*run.figures.get(name, ((), ())), strict=True)
    # a restart may have evaluated a step again
    values = {step: value for step, value in evaluations if math.isfinite(value)}
    if not values:
        return NONE
    # The first of several: a later evaluation with the same value did not replace best.pth.
    best = min(values, key=values.__getitem__) if is_lowest else max(values, key=values.__getitem__)
    return f"{format_number(values[best], _form_of(name))} at step {best:,.0f}"


def _describe_metric(run: Run, name: str) -> dict[str, str]:
    """Return the rows of a metric of the job's own: its last value, and its best one.

    Only the job knows whether a low value is good: a metric that does not choose best.pth has both ends.
    """
    words = in_words(name)
    rows = {words: format_number(run.last(name), _form_of(name))}
    chosen, is_lowest = choice_of(run)
    if name == chosen:
        rows[f"{_ORDERS[is_lowest]} {words}"] = find_best(run, name, is_lowest)
        return rows
    values = run.figures[name][1]
    if np.isfinite(values).any():
        least = format_number(np.nanmin(values), _form_of(name))
        greatest = format_number(np.nanmax(values), _form_of(name))
        rows[f"{words}, all evaluations"] = f"{least} to {greatest}"
    return rows


def _form_of(name: str) -> str:
    """Return the form of the values of a figure: a percentage for accuracies."""
    if "acc" in name or name == "val_top5":
        return PERCENT
    return ".5g"


def summarize(run: Run) -> str:
    """Return the state and the best result of a run, in words: the first lines of the page."""
    name, is_lowest = choice_of(run)
    best = find_best(run, name, is_lowest)
    if best == NONE:
        return _describe_state(run)
    return f"{_describe_state(run)}, {_ORDERS[is_lowest]} {in_words(name)} {best}"


def make_title(runs: list[Run]) -> str:
    """Return the title of the page: the job and its data, if all runs have the same, and their names."""
    # the job and its data are in the title only if all runs have the same
    jobs = set()
    for run in runs:
        words = []
        if run.starts:
            start = run.starts[-1]
            data = start.settings.get("dataset") or start.settings.get("data_url")
            for word in (start.environment.get("job"), data):
                if isinstance(word, str) and word:
                    words.append(os.path.basename(word.rstrip("/")))
        jobs.add(" on ".join(words))
    names = ", ".join(run.name for run in runs)
    if len(jobs) > 1 or "" in jobs:
        return names
    return f"{jobs.pop()}: {names}"


def make_class_table(run: Run) -> list[list[str]]:
    """Return rows of class, images, right, share, and the class it was taken for most often.

    They are from confusion.json of the last evaluation, the worst classes first; a job that counts no classes
    has none.
    """
    path = os.path.join(run.path, CONFUSION)
    content: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):  # a damaged file is one without classes
        content = json.loads(read_file(path, _MOST_BYTES))
    if not isinstance(content, dict):
        return []
    counts = _whole_numbers(content.get("count"))
    right = _whole_numbers(content.get("correct"))
    names = content.get("classes")
    matrix = content.get("matrix")
    if len(counts) != len(right):
        return []
    if not isinstance(names, list) or len(names) != len(counts):
        names = range(len(counts))
    # with many classes the job writes no matrix: then the last column is empty
    if not isinstance(matrix, list) or len(matrix) != len(counts):
        matrix = [[]] * len(counts)
    rows = []
    for name, count, hits, taken in zip(names, counts, right, matrix, strict=True):
        share = hits / count if count else math.nan
        rows.append((share, [str(name), f"{count:,}", f"{hits:,}", format_number(share, PERCENT), NONE]))
        # the class for which images of this one were taken most often, besides itself
        others = _whole_numbers(taken)
        if len(others) == len(counts) and count > hits:
            others[len(rows) - 1] = -1  # the right class
            rows[-1][1][-1] = f"{names[others.index(max(others))]} ({max(others):,})"
    rows.sort(key=_share_of)
    return [row for _, row in rows[:_MOST_CLASSES]]


def _share_of(row: tuple[float, list[str]]) -> float:
    """Return the key by which the rows of classes are sorted: classes without images come last."""
    return math.inf if math.isnan(row[0]) else row[0]


def _whole_numbers(value: object) -> list[int]:
    """Return a list of whole numbers of JSON; an empty list if it is none."""
    if isinstance(value, list) and all(type(number) is int and 0 <= number < 2**53 for number in value):
        return list(value)
    return []


def _split_time(run: Run) -> dict[str, str]:
    """Return how the time of all epochs was spent: name of SPLIT -> seconds and share, in words."""
    split = np.array(list(run.split.values())).reshape(-1, len(SPLIT)).sum(axis=0)
    if not split.any():
        return dict.fromkeys(SPLIT, NONE)
    cells = {}
    for name, seconds in zip(SPLIT, split, strict=True):
        cells[name] = f"{format_duration(seconds)} ({seconds / split.sum():.1%})"
    return cells


def _repeated(starts: list[Start]) -> str:
    """Return how many steps these starts did again that were reported before. At a URL the reports after the
    last upload may be lost."""
    steps = 0.0
    least = ""
    for start in starts:
        if math.isfinite(start.lost_step):
            steps += max(0.0, start.lost_step - start.step)
        if "://" in str(start.settings.get("output_dir")):
            least = "at least "
    return f"{least}{steps:,.0f}"


def make_start_rows(runs: list[Run]) -> list[list[str]]:
    """Return rows of run, number of the start, time, first step, set-up, downtime, repeated steps, changes,
    and how it ended."""
    rows = []
    for run in runs:
        for number, (before, start) in enumerate(zip([None, *run.starts], run.starts, strict=False), 1):
            row = [run.name, str(number), format_time(start.begun), f"{start.step:,.0f}"]
            row.append(format_duration(start.time - start.begun))
            if before:
                reports = run.times[1][(run.times[1] >= before.time) & (run.times[1] < start.time)]
                # Steps after the last checkpoint are lost, but the process lived until it reported them.
                stopped = np.nanmax([before.time, *reports[-1:], start.lost_time])
                changed = find_differences(
                    [before.settings | before.environment, start.settings | start.environment]
                )
                changes = "; ".join(map(_describe_change, changed))
                row.append(format_duration(start.begun - stopped))
                row.append(_repeated([start]))
                row.append(changes or "nothing")
            row += [NONE] * (8 - len(row))
            rows.append([*row, start.end or NONE])
    return rows


def _describe_change(change: Row) -> str:
    """Return "NAME: BEFORE → AFTER" of a setting that a restart changed."""
    return f"{change.name}: {' → '.join(change.cells)}"


def make_epoch_table(run: Run) -> tuple[list[str], list[list[str]]]:
    """Return (columns, rows) of one run. If there are more than _MOST_ROWS epochs, some are omitted."""
    numbers = sorted(run.ends.keys() | run.split.keys())
    numbers = numbers[:: max(1, math.ceil(len(numbers) / _MOST_ROWS))]
    names: dict[str, None] = {}  # in the order in which epochs have them first
    for number in numbers:
        names.update(dict.fromkeys(run.ends.get(number, {})))
    rows = []
    for number in numbers:
        ends = run.ends.get(number, {})
        row = [str(number)]
        row.extend(format_number(ends.get(name, math.nan), _form_of(name)) for name in names)
        split = run.split.get(number, [math.nan] * len(SPLIT))
        rows.append([*row, *map(format_duration, split)])
    return ["epoch", *names, *SPLIT], rows


def make_rows(columns: list[dict]) -> list[Row]:
    """Return a row for every key of these dictionaries. Empty dictionaries do not count as different."""
    rows = []
    names: dict[str, None] = {}  # in the order of the columns
    for column in columns:
        names.update(dict.fromkeys(column))
    for name in names:
        cells = []
        known = set()
        for column in columns:
            cell = _cell(column[name]) if name in column else NONE
            cells.append(cell)
            if column:  # an empty one is a run whose settings were lost
                known.add(cell)
        rows.append(Row(str(name), cells, len(known) > 1))
    return rows


def find_differences(columns: list[dict]) -> list[Row]:
    """Return the rows of make_rows() that differ."""
    return [row for row in make_rows(columns) if row.differs and row.name not in _SAME]


def compare_receipts(runs: list[Run]) -> list[list[str]]:
    """Return rows of two runs, a line about their data, and one about their states, as `receipt` prints them.

    Each run is compared with the first. A run whose receipt cannot be read has a row with the reason.
    """
    # a run without a receipt must not hide the comparison of the others
    receipts = {}
    by_name = {}
    rows = []
    for run in runs:
        by_name[run.name] = run
        try:
            receipts[run.name] = read(run.path)
        except BadInput as error:
            rows.append([run.name, NONE, str(error), NONE])
    first = receipts.pop(runs[0].name, None)
    if first is not None:
        for name, other in receipts.items():
            try:
                verdict = compare(first, other)[1]
            except ReceiptError as error:
                verdict = str(error)
            rows.append([runs[0].name, name, verdict, _compare_states(runs[0], by_name[name])])
    return rows


def _compare_states(first: Run, other: Run) -> str:
    """Return how the state of a run differs from that of the first one, in words."""
    try:
        text = compare_states(first.path, other.path)[1]
    except BadInput as error:  # a damaged line: the page shows the rest
        text = str(error)
    # The page names runs by short names. The longer path comes first: it may begin with the other one.
    for run in sorted((first, other), key=_length_of_path, reverse=True):
        text = text.replace(run.path, run.name)
    return text


def _length_of_path(run: Run) -> int:
    return len(run.path)


def _cell(value: object) -> str:
    """Return a value of the settings or of the environment as text, as an option of a command has it."""
    text = str(value)
    if value is None:
        text = "none"
    elif isinstance(value, bool):
        text = text.lower()
    if len(text) > 300:  # a list of files, for example
        text = text[:300] + "…"
    return text


def format_number(value: float, form: str = ".5g") -> str:
    """Return five digits, or a share as a percentage (form PERCENT); NONE for NaN."""
    return NONE if math.isnan(value) else format(value, form)


def format_duration(seconds: float) -> str:
    """Return "12.5 s" or "1:04:59", or NONE."""
    if not 0 <= seconds < 1e12:
        return NONE
    if seconds < 99.95:
        if seconds >= 9.995:  # what rounds to 10.0
            return f"{seconds:.1f} s"
        return f"{seconds:.2f} s"
    return str(datetime.timedelta(seconds=round(seconds)))
