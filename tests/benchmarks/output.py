"""The clock, the options and the chart of all benchmarks."""

import sys
import time
from collections.abc import Sequence

import torch

from common import arguments
from common.exits import import_optional


def make_parser(description: str, name: str) -> arguments.Parser:
    """Return a parser of `python -m launch bench NAME` with --cache_dir and --json."""
    parser = arguments.Parser(description)
    parser.prog = f"python -m launch bench {name}"
    parser.add_argument("--cache_dir", default="output_dir/index", help="for indexes (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def log(line: str) -> None:
    """Print a line about the progress to stderr, because a benchmark's result is printed to stdout."""
    print(line, file=sys.stderr, flush=True)


def now(device: torch.device) -> float:
    """Return seconds of time.perf_counter(), after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def tail(text: str) -> str:
    """Return the end of a program's output as one line."""
    return " ".join(text.split())[-500:]


def plot_bars(
    path: str,
    names: Sequence[str],
    rates: Sequence[float],
    ratios: Sequence[float],
    title: str,
    label: str,
    ranges: Sequence[Sequence[float]] | None = None,
) -> None:
    """Write a bar chart of rates as a PNG, with a ratio next to each bar. Raises BadInput without matplotlib.

    path: of the PNG
    names, rates, ratios: one for each bar
    title, label: of the chart, of the axis of rates
    ranges: (least, greatest) rate of each bar
    """
    figure_type = import_optional("matplotlib.figure", "--plot needs matplotlib", "matplotlib").Figure
    figure = figure_type(figsize=(7, 1 + 0.5 * len(names)), layout="constrained")
    axes = figure.subplots()
    reach = ranges and [
        [rate - low for rate, (low, _) in zip(rates, ranges, strict=True)],
        [high - rate for rate, (_, high) in zip(rates, ranges, strict=True)],
    ]
    bars = axes.barh(names, rates, xerr=reach)
    axes.bar_label(bars, [f"{ratio:.2f}x" for ratio in ratios], padding=3)
    axes.invert_yaxis()  # the first on top
    axes.margins(x=0.12)  # room for the last label
    axes.set_xlabel(label)
    axes.set_title(title, fontsize="small")
    figure.savefig(path)
