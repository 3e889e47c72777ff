"""Draw the charts of a report with matplotlib, as SVG without script inside the page.

The drawings contain CSS variables of the page instead of colours. One drawing serves a light and a dark page.
"""

import io
import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import numpy as np

from common.ground.exits import import_optional
from launch.report import tables
from launch.report.runs import SPLIT, Run

matplotlib = import_optional("matplotlib", "the charts need matplotlib")
figure_module = import_optional("matplotlib.figure", "the charts need matplotlib", "matplotlib")
ticker = import_optional("matplotlib.ticker", "the charts need matplotlib", "matplotlib")

DASHES = ((), (7, 3), (2.5, 2.5), (10, 3, 2.5, 3), (14, 4), (5, 2, 1.5, 2, 1.5, 2))  # dashes, in units
_COLOURS = ("text", "soft", "axis", "grid", "panel", *(f"c{n}" for n in range(len(DASHES))), "p0", "p1", "p2")
_WIDTH, _HEIGHT = 380, 240  # units; the page scales them
_GREATEST = 1e100  # greater values are gaps, like infinity
_LOG_FROM = 300  # an axis is logarithmic from this ratio of greatest to least value
_MOST_POINTS = 400  # points of a curve of training; more become intervals
_INTERVALS = 120
_MOST_DOTS = 60
_MOST_BARS = 40
_MOST_MARKS = 60
_CHARTS = (  # heading, figure of training, figure of validation
    ("Loss", "loss", "val_loss"),
    ("Accuracy", "acc", "val_acc"),
    ("Images per second", "images_per_s", None),
    ("Learning rate", "lr", None),
)
_LINEAR = ("acc", "images_per_s", "lr")
_SVG = "{http://www.w3.org/2000/svg}"
ElementTree.register_namespace("", _SVG[1:-1])
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")


def _colour(name: str) -> str:
    """Return the colour that stands for a CSS variable in a drawing."""
    return f"#0000{_COLOURS.index(name):02x}"


_STYLE = {
    "svg.fonttype": "none",  # texts stay texts, in the page's font
    "svg.hashsalt": "report",  # the same data give the same bytes
    "font.family": "DejaVu Sans",  # for the layout; the page replaces it
    "font.size": 13,
    "axes.edgecolor": _colour("axis"),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.labelcolor": _colour("soft"),
    "axes.formatter.useoffset": False,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": _colour("grid"),
    "lines.dash_capstyle": "butt",
    "lines.markersize": 4.5,
    "lines.scale_dashes": False,
    "xtick.bottom": False,
    "xtick.labelcolor": _colour("soft"),
    "ytick.left": False,
    "ytick.labelcolor": _colour("soft"),
}


class _Chart:
    """A drawing with one pair of axes."""

    def __init__(self, title: str, about: str):
        self.label = f"{title}. {about}"
        self.tooltips: list[str] = []  # one for each element, by the index at the end of its id
        self.values: list[np.ndarray] = []  # finite values of the curves
        inches = _WIDTH / 72, _HEIGHT / 72
        self.figure = figure_module.Figure(inches, layout="constrained", facecolor="none")
        self.axes = self.figure.add_subplot(facecolor="none")

    def add_curve(
        self, run: str, x: np.ndarray, y: np.ndarray, style: int, strong: bool = False, summarize: bool = True
    ) -> None:
        """Draw a curve. Values that are not finite are gaps.

        x, y: float64 [n]. style: index of colour and dash. strong: a thicker line, and dots
        summarize: draw more than _MOST_POINTS points as the means and the ranges of intervals
        """
        y = np.where((np.abs(x) < _GREATEST) & (np.abs(y) < _GREATEST), y, np.nan)
        x = np.where(np.isnan(y), np.nan, x)
        self.values.append(y[np.isfinite(y)])
        style %= len(DASHES)
        if len(x) > _MOST_POINTS and summarize:
            x, y, low, high = _summarize(x, y)
            self.axes.fill_between(x, low, high, color=_colour(f"c{style}"), alpha=0.25, linewidth=0)
        dots = "o" if len(self.values[-1]) <= (_MOST_DOTS if strong else 1) else ""
        (line,) = self.axes.plot(
            x, y, color=_colour(f"c{style}"), linewidth=2.4 if strong else 1.5, marker=dots
        )
        line.set_dashes(DASHES[style])
        self.add_tooltip(line, "curve", run)

    def add_restart(self, x: float, text: str) -> None:
        """Draw a vertical line."""
        if abs(x) < _GREATEST:
            line = self.axes.axvline(x, color=_colour("soft"), linewidth=1.5, linestyle=(0, (1.5, 3)))
            self.add_tooltip(line, "mark", text)

    def add_tooltip(self, artist: Any, kind: str, text: str) -> None:
        """Give the element of an artist a class and a tooltip."""
        artist.set_gid(f"{kind} {len(self.tooltips)}")
        self.tooltips.append(text)

    def render(self) -> str:
        """Return the drawing as an SVG element."""
        for axis in (self.axes.xaxis, self.axes.yaxis):
            if max(map(abs, axis.get_data_interval())) >= 1e3 or axis.get_scale() == "log":
                axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: tables.format_short(value)))
        file = io.StringIO()
        self.figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        text = re.sub(
            "#0000([0-9a-f]{2})", lambda match: f"var(--{_COLOURS[int(match[1], 16)]})", file.getvalue()
        )
        root = ElementTree.fromstring(text)
        root.attrib = {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "role": "img", "aria-label": self.label}
        for style in root.findall(f"{_SVG}defs[{_SVG}style]"):  # it would apply to all elements of the page
            root.remove(style)
        for group in root.iter(f"{_SVG}g"):
            kind, _, number = group.attrib.pop("id", "").partition(" ")
            if kind in ("curve", "mark", "part"):
                group.set("class", kind)
            if number:
                ElementTree.SubElement(group, f"{_SVG}title").text = self.tooltips[int(number)]
        return ElementTree.tostring(root, encoding="unicode")


def draw(runs: list[Run]) -> list[dict]:
    """Return the charts that have a value: heading, svg, and whether it shows training and validation."""
    with matplotlib.rc_context(_STYLE):
        return [chart for chart in [*_figures(runs), _progress(runs)] if chart]


def draw_split(runs: list[Run]) -> list[dict]:
    """Return a chart for each run that has reported its time: name, svg, share of waiting."""
    with matplotlib.rc_context(_STYLE):
        return [_split(run) for run in runs if run.split]


def _figures(runs: list[Run]) -> Iterator[dict]:
    known = {name for _, *names in _CHARTS for name in names}
    others = dict.fromkeys(name for run in runs for name in run.figures if name not in known)
    for heading, *names in [*_CHARTS, *((name, name, None) for name in others)]:
        about = f"{heading} by step, of {', '.join(run.name for run in runs)}; figures in the table of epochs"
        chart = _Chart(heading, about)
        for place, run in enumerate(runs):
            for strong, name in enumerate(names):
                if name in run.figures:
                    alone = strong and len(runs) == 1  # two curves, and two colours for them
                    chart.add_curve(run.name, *run.figures[name], place + alone, bool(strong))
            for number, start in enumerate(run.starts[1 : _MOST_MARKS + 1], 2):
                text = f"{run.name}: start {number} continues after step {start.step:,.0f}"
                chart.add_restart(start.step, text)
        values = np.concatenate(chart.values or [np.empty(0)])
        if not len(values):
            continue
        if "acc" in names and abs(values).max() <= 10:
            chart.axes.yaxis.set_major_formatter(ticker.PercentFormatter(1))
        if 0 < values.min() < values.max() / _LOG_FROM and names[0] not in _LINEAR:
            chart.axes.set_yscale("log")
            chart.axes.minorticks_off()
        elif 0 < values.min() < values.max() / 2:
            chart.axes.set_ylim(bottom=0)
        chart.axes.set_xlabel("step")
        chart.axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
        both = all(any(name in run.figures for run in runs) for name in names)
        yield {"heading": heading, "svg": chart.render(), "both": both}


def _summarize(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the means of x, and the means, least and greatest finite values of y, of _INTERVALS parts.

    x, y: float64 [n]. Result: float64 [4, _INTERVALS]; an interval without finite values is NaN
    """
    rows = []
    for part in np.array_split(np.arange(len(x)), _INTERVALS):
        finite = part[np.isfinite(y[part])]
        part = finite if len(finite) else part[:1]
        rows.append((x[part].mean(), y[part].mean(), y[part].min(), y[part].max()))
    return np.array(rows).T


def _progress(runs: list[Run]) -> dict:
    """Return the chart of steps over time. A curve falls if a restart repeats work after a checkpoint."""
    about = "Steps by the time since each run began; the curve falls if a restart repeats steps"
    chart = _Chart("Progress", about)
    begins = [tables.find_begin(run) for run in runs]
    elapsed = [run.times[1] - begin for run, begin in zip(runs, begins, strict=True)]
    unit, unit_name = tables.choose_unit(max(np.nanmax(each, initial=0.0) for each in elapsed))
    for place, (run, begin) in enumerate(zip(runs, begins, strict=True)):
        began = [start.time for start in run.starts]
        when = np.r_[run.times[1], [start.lost_time for start in run.starts], began, began]
        done = np.r_[run.times[0], [start.lost_step for start in run.starts], [np.nan] * len(began)]
        done = np.r_[done, [start.step for start in run.starts]]
        order = np.argsort(when, kind="stable")  # at a start: a gap, then its step
        chart.add_curve(run.name, (when[order] - begin) / unit, done[order], place, summarize=False)
        for number, start in enumerate(run.starts[1 : _MOST_MARKS + 1], 2):
            text = f"{run.name}: start {number}, after step {start.step:,.0f}"
            chart.add_restart((start.begun - begin) / unit, text)
    if not any(map(len, chart.values)):
        return {}
    chart.axes.set_xlabel(unit_name)
    chart.axes.set_ylim(bottom=0)
    return {"heading": "Steps over time", "svg": chart.render(), "both": False}


def _split(run: Run) -> dict:
    """Return the chart of waiting, computing and evaluating by epoch. If there are many epochs, several share
    a bar."""
    numbers = sorted(run.split)
    size = -(-len(numbers) // _MOST_BARS)
    groups = [numbers[place : place + size] for place in range(0, len(numbers), size)]
    seconds = np.array([np.sum([run.split[number] for number in group], axis=0) for group in groups])
    unit, unit_name = tables.choose_unit(seconds.sum(axis=1).max())
    about = f"Seconds of {', '.join(SPLIT)}, by epoch, of {run.name}; figures in the table of epochs"
    chart = _Chart(f"Time of {run.name}", about)
    below = np.zeros(len(groups))
    for part, heights in enumerate((seconds / unit).T):
        chart.axes.bar(range(len(groups)), heights, bottom=below, color=_colour(f"p{part}"), gid="part")
        below += heights
    every = -(-len(groups) * len(str(numbers[-1])) // 24)  # so that the labels do not touch
    places = range(0, len(groups), every)
    chart.axes.set_xticks(places, [str(groups[place][0]) for place in places])
    chart.axes.set_xlabel(f"{unit_name} by {'epoch' if size == 1 else f'{size} epochs'}")
    share = seconds[:, 0].sum() / (seconds.sum() or 1)
    return {"name": run.name, "svg": chart.render(), "waiting": f"{share:.1%}"}
