"""Make one page of runs: curves, speed, waiting, restarts, receipts, settings, environment.

    python -m launch report RUN [RUN...] [--to report.html] [--title TEXT] [--force]

RUN: output folder of a job (metrics.jsonl, starts.jsonl, receipt.bin, checkpoints/), finished, killed or
still running; or a folder of such folders, for example output_dir. The page is one file that loads nothing
and runs no script, for a phone or a desktop. Several runs share the charts; the others are compared with
the first. An earlier report is replaced; any other file only with --force.
"""

import os
import re
import time

import numpy as np
from numpy.typing import ArrayLike

from common.arguments import Parser
from common.exits import BadInput, import_optional
from common.files import write_atomic
from launch import confirm
from launch.report import charts as svg
from launch.report import classes, tables
from launch.report import runs as report_runs
from launch.report.charts import Curve, Mark, choose_unit
from launch.report.runs import SPLIT, Run

jinja2 = import_optional("jinja2", "the page needs jinja2")
Markup = import_optional("markupsafe", "the page needs jinja2", "jinja2").Markup

MOST_RUNS = 24
_POINTS = 6000  # of all runs in one chart; they limit the size of the page
_MOST_BARS = 40
_MOST_MARKS = 60
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_CHARTS = (  # heading, figure of training, figure of validation, form
    ("Loss", "loss", "val_loss", "number"),
    ("Accuracy", "acc", "val_acc", "percent"),
    ("Images per second", "images_per_s", None, "plain"),
    ("Learning rate", "lr", None, "plain"),
)


def main(arguments: list[str]) -> int:
    """Write the page and return 0. Raises BadInput."""
    parser = Parser(__doc__)
    parser.prog = "python -m launch report"
    parser.add_argument("runs", metavar="RUN", nargs="+", help="output folder of a job, or a folder of them")
    parser.add_argument("--to", metavar="FILE", default="report.html", help="default: report.html")
    parser.add_argument("--force", action="store_true", help="replace FILE even if it is not a report")
    parser.add_argument("--title", help="default: the names of the runs")
    args = parser.parse_args(arguments)
    paths = [path for named in args.runs for path in report_runs.find_runs(named)]
    if len(paths) > MOST_RUNS:
        raise BadInput(f"{len(paths)} runs are too many for one page: at most {MOST_RUNS}")
    _check_to(args.to, paths, args.force)
    runs = [report_runs.read(path, name) for path, name in zip(paths, _names(paths), strict=True)]
    content = render_page(runs, args.title).encode("utf-8", "replace")  # a folder's name may not be UTF-8
    _write(args.to, content.decode())
    for run in runs:
        for note in run.notes:
            print(f"{run.path}: {note}")
    print(f"{args.to}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}, {len(content) / 1e3:.0f} kB")
    return 0


def _names(paths: list[str]) -> list[str]:
    """Return the shortest ends of the paths that are all different. Raises BadInput if a folder is named
    twice."""
    whole = [os.path.realpath(path) for path in paths]
    for place, path in enumerate(whole):
        if path in whole[:place]:
            raise BadInput(f"{paths[place]} is named twice")
    parts = [path.strip(os.sep).split(os.sep) for path in whole]
    for count in range(1, max(map(len, parts)) + 1):
        names = [os.sep.join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return whole


def _check_to(path: str, runs: list[str], force: bool) -> None:
    """Raise BadInput if the page would replace a file that is not a report, or a result of a run."""
    confirm.check_replaceable(path, re.compile(re.escape(_POLICY)), force)
    folder, name = os.path.split(os.path.abspath(path))
    for run in map(os.path.realpath, runs):
        inside = os.path.commonpath([run, os.path.realpath(folder)]) == run
        page = os.path.realpath(folder) == run and name.endswith(".html")
        if inside and not page and not force:
            raise BadInput(
                f"--to {path} is inside the results of {run}: name NAME.html there, a file elsewhere, or "
                "add --force"
            )


def _write(path: str, content: str) -> None:
    """Write the page atomically. Raises BadInput."""
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(0, "it is a folder")
        write_atomic(path, content)
    except OSError as error:
        raise BadInput(f"cannot write --to {path}: {error.strerror}") from error


def render_page(runs: list[Run], title: str | None = None) -> str:
    """Return the HTML of runs. Their names must differ."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(os.path.dirname(os.path.abspath(__file__))),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    settings = [run.starts[-1].settings if run.starts else {} for run in runs]
    by_class = [(run.name, found) for run in runs if (found := classes.read(run))]
    notes: dict[str, list[str]] = {}
    for run in runs:
        for note in run.notes:
            notes.setdefault(note, []).append(run.name)
    return environment.get_template("page.html").render(
        title=title or ", ".join(run.name for run in runs),
        made=tables.format_time(time.time()),
        runs=runs,
        notes=notes,
        policy=Markup(_POLICY),
        styles=svg.STYLES,
        final=tables.make_final_rows(runs),
        charts=[chart for chart in [*_curves(runs), _progress(runs)] if chart["svg"]],
        splits=[chart for chart in map(_split, runs) if chart["svg"]],
        classes=by_class,
        starts=tables.make_start_rows(runs),
        epochs=[tables.make_epoch_table(run, len(runs)) for run in runs],
        receipts=tables.compare_receipts(runs),
        differing=tables.find_differences(settings),
        settings=tables.make_rows(settings),
        environment=tables.make_rows([run.starts[-1].environment if run.starts else {} for run in runs]),
    )


def _curves(runs: list[Run]) -> list[dict]:
    known = {name for _, *names, _ in _CHARTS for name in names}
    others = dict.fromkeys(name for run in runs for name in run.figures if name not in known)
    charts = []
    for heading, training, validation, form in [*_CHARTS, *((name, name, None, "number") for name in others)]:
        curves = []
        for place, run in enumerate(runs):
            for name in (training, validation):
                if name in run.figures:
                    alone = name == validation and len(runs) == 1  # two curves, and two colours for them
                    look = "strong" if name == validation else ""
                    curves += _of(run, name, place + alone, look, max(60, min(800, _POINTS // len(runs))))
        marks = [
            Mark(start.step, f"{run.name}: start {number} continues after step {start.step:,.0f}", place)
            for place, run in enumerate(runs)
            for number, start in enumerate(run.starts[1 : _MOST_MARKS + 1], 2)
        ]
        about = f"{heading} by step, of {', '.join(run.name for run in runs)}; figures in the table of epochs"
        picture = svg.draw_lines(heading, about, curves, marks, form=form)
        looks = {curve.look for curve in curves}
        shown = {"both": {"", "strong"} <= looks, "long": "faint" in looks, "restarts": bool(marks)}
        charts.append({"heading": heading, "svg": Markup(picture)} | shown)
    return charts


def _of(run: Run, name: str, style: int, look: str, most: int) -> list[Curve]:
    """Return the curves of a figure. More than `most` points become their means, in front of faint
    extremes."""
    x, y = run.figures[name]
    if len(x) <= most:
        return [Curve(run.name, x, y, style, look)]
    pale = Curve(run.name, *report_runs.thin_out(x, y, most), style, "faint")
    return [pale, Curve(run.name, *report_runs.average(x, y, most // 6), style, look)]


def _progress(runs: list[Run]) -> dict:
    """Return the chart of steps over time. A curve falls if a restart repeats work after a checkpoint."""
    seconds, curves, marks = 0.0, [], []
    for place, run in enumerate(runs):
        begin = tables.find_begin(run)
        steps, times = run.times
        bounds = [start.time for start in run.starts]
        parts = np.searchsorted(bounds, times, side="right")  # the start of each line; 0: none
        most = max(10, min(800, _POINTS // len(runs)) // (len(bounds) + 1))
        x: list[ArrayLike] = []
        y: list[ArrayLike] = []
        for number in range(len(bounds) + 1):
            if number:
                x.append([np.nan, bounds[number - 1]])
                y.append([np.nan, run.starts[number - 1].step])
            done, when = report_runs.thin_out(steps[parts == number], times[parts == number], most)
            x.append(when)
            y.append(done)
            if number and number < len(bounds) and np.isfinite(run.starts[number].lost_time):
                x.append([run.starts[number].lost_time])
                y.append([run.starts[number].lost_step])
        elapsed = np.concatenate(x) - begin
        seconds = max(seconds, float(np.nanmax(elapsed, initial=0.0)))
        curves.append(Curve(run.name, elapsed, np.concatenate(y), place))
        for number, start in enumerate(run.starts[1 : _MOST_MARKS + 1], 2):
            text = f"{run.name}: start {number}, after step {start.step:,.0f}"
            marks.append(Mark(start.begun - begin, text, place))
    unit, name = choose_unit(seconds)
    for each in curves + marks:
        each.x = each.x / unit
    about = "Steps by the time since each run began; the curve falls if a restart repeats steps"
    picture = svg.draw_lines("Progress", about, curves, marks, name, "step")
    shown = {"both": False, "long": False, "restarts": bool(marks)}
    return {"heading": "Steps over time", "svg": Markup(picture)} | shown


def _split(run: Run) -> dict:
    """Return the chart of waiting, computing and evaluating by epoch. If there are many epochs, several share
    a bar."""
    numbers = sorted(run.split)
    size = max(1, -(-len(numbers) // _MOST_BARS))
    groups = [numbers[place : place + size] for place in range(0, len(numbers), size)]
    labels = [str(group[0]) for group in groups]
    stacks = np.array([np.sum([run.split[number] for number in group], axis=0) for group in groups])
    whole = stacks.sum(axis=0) if groups else np.zeros(len(SPLIT))
    counted = "epoch" if size == 1 else f"{size} epochs"
    about = f"Seconds of {', '.join(SPLIT)}, by epoch, of {run.name}; figures in the table of epochs"
    picture = svg.draw_bars(f"Time of {run.name}", about, labels, stacks.reshape(-1, 3), SPLIT, counted)
    share = f"{whole[0] / whole.sum():.1%}" if whole.sum() > 0 else "0%"
    return {"name": run.name, "svg": Markup(picture), "waiting": share}
