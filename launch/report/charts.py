"""Draw the charts of a report with matplotlib, as SVG without script inside the page. The drawings contain
CSS variables of the page instead of colours. One drawing serves a light and a dark page."""

import html
import io
import re
from typing import Any

import numpy as np

from bootfile.ground.errors import import_optional
from launch.report.runs import UNITS, Run, in_words

matplotlib = import_optional("matplotlib", "the charts need matplotlib")
figure_module = import_optional("matplotlib.figure", "the charts need matplotlib", "matplotlib")
ticker = import_optional("matplotlib.ticker", "the charts need matplotlib", "matplotlib")

DASHES = ((), (7, 3), (2.5, 2.5), (10, 3, 2.5, 3), (14, 4), (5, 2, 1.5, 2, 1.5, 2))  # dashes, in units
_COLOURS = ("text", "soft", "axis", "grid", "panel", *(f"c{n}" for n in range(len(DASHES))))
_WIDTH = 380  # units; the page scales them
_HEIGHT = 240
_PLACE = (0.17, 0.2, 0.8, 0.76)  # left, bottom, width and height of the plot: a label has 7 characters
_LOG_FROM = 300  # an axis of losses is logarithmic from this ratio of greatest to least value
_MOST_POINTS = 400  # points of a curve; more become intervals
_INTERVALS = 120
_MOST_DOTS = 60
_STRONG = 2.4  # width of a strong line
_MOST_MARKS = 60
_RESULTS = (  # heading, figure of training, figure of validation
    ("Loss", "loss", "val_loss"),
    ("Accuracy", "acc", "val_acc"),
)
_RATES = (*((f"{unit.capitalize()} per second", f"{unit}_per_s") for unit in UNITS), ("Learning rate", "lr"))


def _colour(name: str | int) -> str:
    """Return the colour that a drawing has for a CSS variable of the page, or for the place of a run."""
    variable = f"c{name % len(DASHES)}" if isinstance(name, int) else name
    return f"#0000{_COLOURS.index(variable):02x}"


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


def draw(runs: list[Run]) -> list[dict]:
    """Return the charts that have a value: heading, svg, and "both": it shows training and validation."""
    with matplotlib.rc_context(_STYLE):
        return [_draw_chart(runs, heading, names) for heading, *names in _list_charts(runs)]


def _draw_chart(runs: list[Run], heading: str, names: list[str]) -> dict:
    """Return the chart of these figures, of which a run has a value, inside the style of draw()."""
    values = np.concatenate([run.figures[name][1] for run in runs for name in names if name in run.figures])
    axes = _make_axes()
    for place, run in enumerate(runs):
        _draw_run(axes, run, names, place, len(runs))
    if names[0] == "acc":
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1))
    title = heading
    # on a linear axis the last part of such a curve would lie on the zero
    if names[0].endswith("loss") and 0 < np.nanmin(values) < np.nanmax(values) / _LOG_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        title += " (logarithmic scale)"
    if names[0].endswith("_per_s") or names[0] == "memory_mb":
        axes.set_ylim(bottom=0)  # a change of 1 % must look like one
    svg = _render(axes, heading, f"{heading} by step", runs)
    # The page explains the dots of validation only if a curve of training is next to them.
    has_both = len(names) > 1 and {*names} <= {name for run in runs for name in run.figures}
    return {"heading": title, "svg": svg, "both": has_both}


def _list_charts(runs: list[Run]) -> list[tuple[str, ...]]:
    """Return (heading, figures) of each chart that has a value; metrics of the job come before rates."""
    known = {name for _, *names in (*_RESULTS, *_RATES) for name in names}
    figures_of_job = dict.fromkeys(name for run in runs for name in run.figures if name not in known)
    of_job = [(in_words(name)[:1].upper() + in_words(name)[1:], name) for name in figures_of_job]
    metrics = [chart for chart in of_job if chart[1].startswith("val_")]
    others = [chart for chart in of_job if chart not in metrics]
    with_value = {name for run in runs for name in run.figures if np.isfinite(run.figures[name][1]).any()}
    every = [*_RESULTS, *metrics, *_RATES, *others]
    return [chart for chart in every if with_value.intersection(chart[1:])]


def width_of(place: int, count: int) -> float:
    """Return the width of the lines of a run, in units. The first of several is a broad line below the
    others, so that a reader sees both of two equal curves."""
    return 5.0 if place == 0 and count > 1 else 1.5


def _draw_run(axes: Any, run: Run, names: list[str], place: int, count: int) -> None:
    """Draw the curves of a run and a mark for each of its restarts. names: the figure of training, and that
    of validation if there is one. place: of the run, which chooses its style. count: of all runs."""
    for number, name in enumerate(names):
        is_validation = number > 0 or name.startswith("val_")
        # the two curves of one run have colours; several runs have one each
        style = place + (is_validation and count == 1)
        if name in run.figures:
            _draw_curve(axes, *run.figures[name], style, is_validation, width_of(place, count))
    colour = _colour(place if count > 1 else "soft")
    for start in run.starts[1 : _MOST_MARKS + 1]:
        axes.axvline(start.step, color=colour, linewidth=1.5, linestyle=(0, (1.5, 3)), gid="mark")


def _make_axes() -> Any:
    """Return the empty axes of one chart, inside the style of draw()."""
    figure = figure_module.Figure((_WIDTH / 72, _HEIGHT / 72), facecolor="none")
    axes = figure.add_axes(_PLACE, facecolor="none", xlabel="optimizer step")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    return axes


def _draw_curve(
    axes: Any, x: np.ndarray, y: np.ndarray, style: int, strong: bool, width: float = 1.5
) -> None:
    """Draw a curve; many points as the means and the ranges of intervals. NaN is a gap.

    x, y: float64 [n]. style: index of colour and dash. strong: a thicker line, and dots.
    width: of the line, in units; a broad line is pale, so that one above it is seen.
    """
    colour = _colour(style)
    points = np.count_nonzero(~np.isnan(y))
    # more points than the curve has pixels: draw the means and the ranges of intervals
    if len(x) > _MOST_POINTS:
        x, y, low, high = _summarize(x, y)
        axes.fill_between(x, low, high, color=colour, alpha=0.25, linewidth=0)
    alpha = 0.5 if width > _STRONG else 1.0
    marker = "o" if points <= (_MOST_DOTS if strong else 1) else ""  # a single point has no line
    width = max(width, _STRONG) if strong else width
    dashes = (0, DASHES[style % len(DASHES)])
    axes.plot(x, y, color=colour, gid="curve", linewidth=width, linestyle=dashes, marker=marker, alpha=alpha)


def _summarize(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the means of x, and the means, least and greatest values of y, of _INTERVALS parts.

    x, y: float64 [n]. Result: float64 [4, _INTERVALS]; an interval without values is NaN
    """
    rows = []
    for part in np.array_split(np.arange(len(x)), _INTERVALS):
        known = part[~np.isnan(y[part])]
        shown = known if len(known) else part[:1]  # an interval with any value has no gap
        rows.append((x[shown].mean(), y[shown].mean(), y[shown].min(), y[shown].max()))
    return np.array(rows).T


def _render(axes: Any, title: str, about: str, runs: list[Run]) -> str:
    """Return the drawing as an SVG element of the page."""
    file = io.StringIO()
    axes.figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = file.getvalue().partition("<svg")[2].partition(">")[2]
    text = re.sub(r"<defs>\s*<style.*?</defs>", "", text, flags=re.DOTALL)  # it would apply to the whole page
    # the CSS variables that the colours stand for
    text = re.sub("#0000([0-9a-f]{2})", lambda match: f"var(--{_COLOURS[int(match[1], 16)]})", text)
    names = ", ".join(run.name for run in runs)
    label = html.escape(f"{title}. {about}, of {names}; figures in the table of epochs")
    text = text.replace("<g id=", "<g class=")  # ids must differ within a page
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{text}'
