"""Compare what two runs left: samples of the steps, states at checkpoints, figures, files of weights."""

import glob
import os
import re
from typing import Any, NamedTuple

from bootfile.exact import digest_lines
from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, read_json_lines
from bootfile.machine.differences import first_difference
from bootfile.receipt import starts
from bootfile.receipt.reading import bad_input, find_receipt, read
from bootfile.receipt.steps import compare

_MOST = 2**30  # bytes of metrics.jsonl
# times, memory and lost processes, in which equal runs differ, and digests of the data and the state
_NO_FIGURES = re.compile(
    r"(.*_)?(time|seconds|per_s|s|ms|mb)|generations|lost_processes|useful_share|receipt|states"
)
_Figures = dict[tuple[Any, str], str]  # (step, name) -> value


class Line(NamedTuple):
    """One comparison. part: one of PARTS. text: its result in words."""

    part: str
    equal: bool
    text: str


PARTS = ("data", "state", "figures", "weights")


def compare_runs(first: str, second: str, pattern: str) -> list[Line]:
    """Compare two output folders, each part that they have. pattern: of the files of weights below a folder.
    Raises BadInput."""
    lines = []
    if find_receipt(first) or find_receipt(second):
        lines.append(Line("data", *compare_receipts(first, second)))
    if digest_lines.read(first) or digest_lines.read(second):
        lines.append(Line("state", *compare_states(first, second)))
    figures = [_read_figures(run) for run in (first, second)]
    if starts.read(first):
        other = _find_other_figure(*figures) or _find_missing_figure(*figures)
        lines.append(Line("figures", not other, other or f"equal: {len(figures[0])}"))
    names = [find_files(folder, pattern) for folder in (first, second)]
    if any(names):
        lines.append(_compare_weights(first, second, *names))
    return lines


def compare_receipts(first: str, second: str) -> tuple[bool, str]:
    """Return (whether the samples of two runs are equal, one line about it). Raises BadInput."""
    names = [find_receipt(folder) for folder in (first, second)]
    if names[0] != names[1]:
        return False, f"only one run has {names[0] or names[1]}"
    with bad_input():
        return compare(read(first), read(second))


def compare_states(first: str, second: str) -> tuple[bool, str]:
    """Return (whether the states of two runs are equal where they should be, one line about them).

    first, second: output folders. States are compared at the steps whose digest both runs have. Raises
    BadInput.
    """
    lines = digest_lines.read(first, whole=True), digest_lines.read(second, whole=True)
    steps = sorted(lines[0].keys() & lines[1].keys())
    if not steps:
        return True, "not compared: the runs have no digest of the same step (a checkpoint or an epoch's end)"
    others = [step for step in steps if len({_form(line[step]) for line in lines}) > 1]
    steps = [step for step in steps if step not in others]
    end = f"not comparable at {_numbers(others)}: digests of an earlier version, and of a later one"
    if not steps:
        return True, end
    end = f"; {end}" if others else ""
    different = [step for step in steps if lines[0][step]["digest"] != lines[1][step]["digest"]]
    equal = f"equal at {_numbers([step for step in steps if step not in different])}{end}"
    shards = [read_setting(run, "exact_shards") for run in (first, second)]
    is_exact = shards[0] is not None and shards[0] == shards[1]
    if not different:
        figures = (_read_figures(run, "val_") for run in (first, second))
        figure = _find_other_figure(*figures) if is_exact else ""
        return not figure, f"{equal}; {figure}" if figure else equal
    step = different[0]
    cause = compare_machines((first, second), lines[0][step], lines[1][step])
    text = f"differs at {step}{cause and f'; {cause}'}: "
    text += _describe(step, (first, second), (lines[0][step], lines[1][step]))
    text = f"{equal}; {text}" if len(different) < len(steps) else f"{text}{end}"
    sizes = [_world_size(run) for run in (first, second)]
    is_expected = sizes[0] != sizes[1] and not is_exact
    if is_expected:
        text += f"; expected: {sizes[0]} and {sizes[1]} processes round sums, and draw numbers, differently"
    return is_expected, text


def compare_machines(runs: tuple[str, str], first: dict[str, Any], second: dict[str, Any]) -> str:
    """Return the first difference between what computed two states, in words; "" without one, or if a version
    before 0.30 wrote them. first, second: their lines of state.jsonl."""
    machines = []
    for line in (first, second):
        known = line.get("machines")
        machines.append([each for each in known if isinstance(each, dict)] if isinstance(known, list) else [])
    return first_difference(runs, *machines) if all(machines) else ""


def _form(line: dict[str, Any]) -> tuple[Any, bool]:
    """Return what two lines of state.jsonl must have in common to be comparable. Before 0.24 they had no
    numbers of parameter groups."""
    return line.get("format"), any(".param_groups." in name for name in line["parts"])


def _read_figures(run: str, start: str = "") -> _Figures:
    """Return the figures of a job of Bootfile, without times and memory: (step, name) -> value. start: of
    their names, "val_" for an evaluation."""
    path = os.path.join(run, "metrics.jsonl")
    with explained(f"{path} cannot be read"):
        lines = read_json_lines(path, _MOST)
    return {
        (line.get("step"), name): str(each)
        for line in lines
        for name, each in line.items()
        if name.startswith(start) and not _NO_FIGURES.fullmatch(name)
    }


def _find_other_figure(first: _Figures, second: _Figures) -> str:
    """Return the first figure that differs, in words; "" without one."""
    for (step, name), value in first.items():
        if value != second.get((step, name), value):
            return f"{name} differs at step {step}: {value} and {second[step, name]}"
    return ""


def _find_missing_figure(first: _Figures, second: _Figures) -> str:
    """Return the first figure that only one run has, in words; "" without one."""
    for step, name in [*first, *second]:
        if ((step, name) in first) != ((step, name) in second):
            return f"only one run has {name} at step {step}"
    return ""


def _numbers(steps: list[int]) -> str:
    if not steps:
        return "no step"
    shown = steps if len(steps) < 8 else [*steps[:3], "...", *steps[-3:]]
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, shown))}"


def _describe(step: int, runs: tuple[str, str], lines: tuple[dict[str, Any], dict[str, Any]]) -> str:
    """Return the name of the part that differs most, and by how much if both checkpoints still exist."""
    theirs, ours = (line["parts"] for line in lines)
    names = [name for name in sorted(theirs.keys() | ours.keys()) if theirs.get(name) != ours.get(name)]
    others = f", and {len(names) - 1} more" if len(names) > 1 else ""
    if not names:
        return "a part that has no digest of its own"
    sizes = _find_differences(runs, step, names)
    if not sizes:
        return f"{names[0]}{others} (by how much: keep the checkpoints of both runs)"
    name = max(names, key=lambda each: sizes[each])
    return f"{name}{others} (largest relative difference {sizes[name]:.1g})"


def _find_differences(runs: tuple[str, str], step: int, names: list[str]) -> dict[str, float]:
    """Return how much these parts of the checkpoints of a step differ; {} if a checkpoint cannot be read."""
    from bootfile.exact import digest, files  # import torch, which records do not need

    paths = [os.path.join(run, "checkpoints", files.name_of(step)) for run in runs]
    try:
        states = [dict(digest.leaves(files.read(path)["objects"])) for path in paths]
    except (files.Refused, KeyError, TypeError, AttributeError):
        return {}
    return {name: _difference(*(state.get(name) for state in states)) for name in names}


def _difference(one: object, other: object) -> float:
    """Return the largest difference of two values, relative to the largest number; inf if they have none."""
    import torch

    try:
        one, other = (torch.as_tensor(each).double() for each in (one, other))
        return float((one - other).abs().max() / torch.maximum(one.abs().max(), other.abs().max()))
    except (TypeError, ValueError, RuntimeError):  # a part that one run lacks, text, or another shape
        return float("inf")


def read_setting(run: str, name: str) -> object:
    """Return an option of a run, as its last start had it; None if it is not known."""
    return next((start["settings"].get(name) for start in reversed(starts.read(run, whole=True))), None)


def _world_size(run: str) -> object:
    sizes = [start["environment"].get("world size", 1) for start in starts.read(run, whole=True)]
    return max((size for size in sizes if isinstance(size, int)), default=1)


def _compare_weights(first: str, second: str, ours: list[str], theirs: list[str]) -> Line:
    if ours != theirs:
        return Line("weights", False, f"only one run has {min(set(ours) ^ set(theirs))}")
    for name in ours:
        one, other = (_summarize(os.path.join(folder, name)) for folder in (first, second))
        parts = [part for part in sorted(one | other) if one.get(part) != other.get(part)]
        if parts:
            more = f", and {len(parts) - 1} more" if len(parts) > 1 else ""
            return Line("weights", False, f"{name} differs: {parts[0]}{more}")
    return Line("weights", True, f"equal in {len(ours)} file{'s' * (len(ours) > 1)}")


def _summarize(path: str) -> dict[str, str]:
    """Return a digest of each tensor and number in a file of weights. Raises BadInput."""
    from bootfile.exact import digest, files

    try:
        parts: dict[str, str] = digest.summarize(0, files.load(path))["parts"]
    except files.Refused as reason:
        raise BadInput(f"{path} cannot be compared: {reason}") from reason
    return parts


def find_files(folder: str, pattern: str) -> list[str]:
    """Return the paths, below the folder, of the files that match the pattern."""
    paths = glob.glob(os.path.join(glob.escape(folder), pattern), recursive=True)
    return sorted(os.path.relpath(path, folder) for path in paths if os.path.isfile(path))
