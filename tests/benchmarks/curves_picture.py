"""Draw learning curves of several jobs and seeds."""

import numpy as np

from common.exits import BadInput, import_optional
from tests.benchmarks import curves

# the colours of Okabe and Ito, which colour-blind readers can distinguish, and line styles
_STYLES = [("#D55E00", "-"), ("#0072B2", "--"), ("#009E73", "-."), ("#000000", ":"), ("#CC79A7", (0, (1, 3)))]
_TICKS = [0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998]
_TOP = 0.999  # upper limit of the accuracy in the chart


def check(path: str) -> None:
    """Raise BadInput if draw() cannot write to this path."""
    if not path.endswith(".png"):
        raise BadInput(f"--plot {path}: expected a name that ends in .png")
    import_optional("matplotlib", "--plot needs matplotlib")


def draw(found: dict, path: str) -> None:
    """Write a PNG of 800x450 pixels: test accuracy over seconds of training, median and range over the seeds.

    Between evaluations and after its end, a run has the accuracy of the last evaluation. The vertical axis is
    logarithmic in the error, so that the last points can be distinguished.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    axes = figure.subplots()
    best = found["target"]
    for (job, runs), (colour, line) in zip(curves.contestants(found).items(), _STYLES * 9, strict=False):
        runs = [run for run in runs if run["curve"]]
        if not runs:
            continue
        times, values = _steps(runs, found["limit"])
        best = max(best, values.max())
        middle = np.median(values, axis=0)
        label = f"{job}, n={len(runs)}"
        axes.step(times, middle, where="post", color=colour, linestyle=line, linewidth=2, label=label)
        axes.fill_between(
            times, values.min(axis=0), values.max(axis=0), step="post", color=colour, alpha=0.18, linewidth=0
        )
        low, high = curves.median([curves.time_to(run, found["target"], found["limit"]) for run in runs])
        if low == high:
            axes.plot([low], [found["target"]], "o", color=colour, markersize=7, markeredgecolor="white")
    axes.axhline(found["target"], color="#555555", linestyle=(0, (4, 3)), linewidth=1)
    axes.annotate(
        f"target {found['target']:g}", (0.005, found["target"]), xycoords=("axes fraction", "data"),
        xytext=(0, 3), textcoords="offset points", color="#555555",
    )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yscale("function", functions=(_stretched, lambda height: 1 - 10.0**-height))
    axes.set_ylim(0, min(_TOP, 1 - 0.6 * (1 - best)))
    axes.yaxis.set_major_locator(FixedLocator(_TICKS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda accuracy, _: f"{accuracy:g}"))
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("seconds of training, evaluating and saving included")
    axes.set_ylabel("test accuracy")
    axes.set_title(f"{found['dataset']}: median and range of the seeds", fontsize="medium")
    axes.legend(loc="lower right", handlelength=3.5)
    figure.savefig(path, format="png")


def _stretched(accuracy):
    return -np.log10(1 - np.minimum(accuracy, _TOP))


def _steps(runs: list[dict], limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (seconds [T], accuracy [runs, T]) at each evaluation of any run, and at the end.

    The first time is when every run has had an evaluation.
    """
    points = [np.array(run["curve"]).T for run in runs]
    ends = [limit for run in runs if run["ended"] == "limit"]
    times = np.unique(np.concatenate([*(seconds for seconds, _ in points), ends]))
    times = times[times >= max(seconds[0] for seconds, _ in points)]
    return times, np.stack([a[np.searchsorted(seconds, times, side="right") - 1] for seconds, a in points])
