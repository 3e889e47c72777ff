"""Compute times to an accuracy from learning curves of several jobs and seeds.

The input is the JSON of tests/benchmarks/time_to_accuracy.py, whose docstring describes it. A time is an
interval (low, high): (seconds, seconds) if the target was reached, (seconds, infinity) if it was not. Medians
and ratios of intervals are intervals.
"""

import json
import math
import statistics

from common.exits import BadInput

BASELINE = "seed loop"  # the ratios are to this contestant

Interval = tuple[float, float]

_ENDED = {
    "limit": "ended at the limit",
    "target": "ended when the target was reached: best and final accuracy are of that moment",
    "diverged": "diverged",
}


def read(path: str) -> dict:
    """Return the content of a file of --json. Raises BadInput."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        _check(found)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path} is not a file of --json: {type(error).__name__}: {error}") from error
    return found


def _check(found: dict) -> None:
    for name, kind in {"dataset": str, "date": str, "machine": str, "runs": list}.items():
        if not isinstance(found[name], kind):
            raise TypeError(f"{name} is {found[name]!r}")
    if not (0 < found["target"] <= 1 and found["limit"] > 0 and found["load_average"] >= 0):
        raise ValueError("target, limit or load average is not a valid number")
    if not found["runs"]:
        raise ValueError("the list of runs is empty")
    for run in found["runs"]:
        where = f"{run['job']}, seed {run['seed']}"
        if run["ended"] not in ("schedule", *_ENDED):
            raise ValueError(f"{where}: ended is {run['ended']!r}")
        if not all(float(seconds) >= 0 for seconds in (*run["laps"].values(), run["seconds"])):
            raise ValueError(f"{where}: seconds below 0")
        times = [float(seconds) for seconds, accuracy in run["curve"] if 0 <= accuracy <= 1]
        if len(times) < len(run["curve"]) or times != sorted(times) or not all(t > 0 for t in times):
            raise ValueError(f"{where}: the points of curve are not [seconds, accuracy] in the order of time")
        if times and times[-1] > found["limit"]:
            raise ValueError(f"{where}: an evaluation after the limit")
        if run["ended"] == "target" and not times:
            raise ValueError(f"{where}: the target was reached without an evaluation")
        run["options"]  # KeyError


def time_to(run: dict, target: float, limit: float, compiling: bool = False) -> Interval:
    """Return the seconds of training until an evaluation reached `target`, optionally with compiling."""
    before = run["laps"].get("compilation", 0.0) if compiling else 0.0
    for seconds, accuracy in run["curve"]:
        if accuracy >= target:
            return before + seconds, before + seconds
    # a run that reached a lower target may have ended before its limit
    watched = run["curve"][-1][0] if run["ended"] == "target" else limit
    return before + watched, math.inf


def median(intervals: list[Interval]) -> Interval:
    """Return the median of intervals."""
    lows, highs = zip(*intervals, strict=True)
    return statistics.median(lows), statistics.median(highs)


def ratio(slow: Interval, fast: Interval) -> Interval:
    """Return slow / fast."""
    return slow[0] / fast[1], slow[1] / fast[0]


def summary(run: dict, target: float, limit: float) -> str:
    """Return one line on a run."""
    final = f", {run['curve'][-1][1]:.4f} after {run['curve'][-1][0]:.1f} s" if run["curve"] else ""
    return f"{target:g} in {_seconds(time_to(run, target, limit))} s{final}, ended by {run['ended']}"


def table(found: dict) -> str:
    """Return Markdown: the contestants, ratios to the sample's loop, and the conditions of the figures."""
    target, limit, jobs = found["target"], found["limit"], contestants(found)
    compiled = any(run["laps"].get("compilation") for run in found["runs"])
    columns = ["contestant", "seeds", "reached"]
    for what in ["", " with compiling"] if compiled else [""]:
        columns += [f"s to {target:g}{what}, median", "range"]
    columns += ["best accuracy", "final accuracy", "s of training", "s in all"]
    lines = [f"{found['date']}, {found['dataset']}, {found['machine']}", "", *_header(columns)]
    for job, runs in jobs.items():
        cells = [job, len(runs), sum(time_to(run, target, limit)[1] < math.inf for run in runs)]
        for compiling in [False, True] if compiled else [False]:
            times = [time_to(run, target, limit, compiling) for run in runs]
            cells += [_seconds(median(times)), _range(times)]
        accuracies = [[accuracy for _, accuracy in run["curve"]] for run in runs if run["curve"]]
        cells += [_spread([max(each) for each in accuracies]), _spread([each[-1] for each in accuracies])]
        trained = [run["curve"][-1][0] for run in runs if run["curve"]]
        cells += [f"{statistics.median(trained):.1f}" if trained else "-"]
        cells += [f"{statistics.median(run['seconds'] for run in runs):.1f}"]
        lines.append(_row(cells))
    lines += ["", *_notes(jobs)]
    if BASELINE in jobs and len(jobs) > 1:
        lines += ["", *_ratios(jobs, target, limit, compiled)]
    return "\n".join([*lines, "", f"load average at the end {found['load_average']:.2f}"])


def contestants(found: dict) -> dict[str, list[dict]]:
    """Return {job: its runs}."""
    jobs: dict[str, list[dict]] = {}
    for run in found["runs"]:
        jobs.setdefault(run["job"], []).append(run)
    return jobs


def _ratios(jobs: dict, target: float, limit: float, compiled: bool):
    """Yield a table of the baseline's times divided by the others' times: medians, and seed by seed."""
    columns = ["contestant"]
    for what in ["", " with compiling"] if compiled else [""]:
        columns += [f"speed-up over the {BASELINE} to {target:g}{what}, medians", "seed by seed"]
    yield from _header(columns)
    for job, runs in jobs.items():
        if job == BASELINE:
            continue
        cells = [job]
        for compiling in [False, True] if compiled else [False]:
            base = {run["seed"]: time_to(run, target, limit, compiling) for run in jobs[BASELINE]}
            own = {run["seed"]: time_to(run, target, limit, compiling) for run in runs}
            pairs = [ratio(base[seed], own[seed]) for seed in own if seed in base]
            medians = ratio(median([*base.values()]), median([*own.values()]))
            cells += [_times(medians), _range(pairs, _times) if pairs else "-"]
        yield _row(cells)


def _notes(jobs: dict):
    for job, runs in jobs.items():
        yield f"- {job}: `{runs[0]['options']}`"
        for how, words in _ENDED.items():
            if count := sum(run["ended"] == how for run in runs):
                yield f"  - {count} of {len(runs)} {words}"
        if none := sum(not run["curve"] for run in runs):
            yield f"  - {none} of {len(runs)} had no evaluation, so their accuracy is unknown"


def _header(columns: list) -> list[str]:
    return [_row(columns), f"|{'---|' * len(columns)}"]


def _row(cells: list) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _seconds(interval: Interval) -> str:
    low, high = interval
    if high == math.inf:
        return f"> {round(low, 1):g}"
    return f"{low:.1f}" if low == high else f"{low:.1f}-{high:.1f}"


def _range(intervals: list[Interval], shown=_seconds) -> str:
    """Return text for the smallest to the largest time, if known."""
    least, most = min(intervals), max(intervals, key=lambda each: (each[1], each[0]))
    return shown(least) if least[1] == math.inf else f"{shown(least)} to {shown(most)}"


def _times(interval: Interval) -> str:
    low, high = interval
    if high == math.inf:
        return f"> {low:.2f}x" if low else "unknown"
    if low == high:
        return f"{low:.2f}x"
    return f"{low:.2f}-{high:.2f}x" if low else f"< {high:.2f}x"


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.4f} ({min(values):.4f}-{max(values):.4f})"
