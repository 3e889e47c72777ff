"""Compare what two runs left: samples of the steps, states at checkpoints, figures, files of weights."""

import glob
import os
import re
from typing import Any, NamedTuple

from bootfile.exact import digest_lines
from bootfile.exact.kinds import find_kind
from bootfile.ground.files import explained, read_json_lines
from bootfile.ground.results import CHECKPOINTS
from bootfile.machine.differences import first_difference
from bootfile.receipt import starts
from bootfile.receipt.reading import bad_input, find_receipt, read
from bootfile.receipt.steps import compare

_MOST = 2**30  # bytes of metrics.jsonl
# times, memory, ranks and lost processes, in which equal runs differ, and digests of the data and the state
_NO_FIGURES = re.compile(
    r"(.*_)?(time|seconds|per_s|s|ms|mb)|generations|lost_processes|useful_share|ranks|receipt|states"
)
_Figures = dict[tuple[Any, str], str]  # (step, name) -> value


class Line(NamedTuple):
    """One comparison. part: one of PARTS. text: its result in words."""

    part: str
    equal: bool
    text: str


PARTS = ("data", "state", "figures", "weights")


def compare_runs(first: str, second: str, pattern: str) -> list[Line]:
    """Compare two output folders, each part that they have.

    `prove` calls it with the reference and the folder of a case. pattern: of the files of weights below a
    folder. Raises BadInput.
    """
    lines = []
    # each part if one of the runs has it: a part that only one has is a difference
    if find_receipt(first) or find_receipt(second):
        is_equal, text = compare_receipts(first, second)
        lines.append(Line("data", is_equal, text))
    if digest_lines.read(first) or digest_lines.read(second):
        is_equal, text = compare_states(first, second)
        lines.append(Line("state", is_equal, text))
    first_figures = _read_figures(first)
    second_figures = _read_figures(second)
    if starts.read(first):  # a script without Bootfile has no figures that we know
        difference = _find_other_figure(first_figures, second_figures)
        if not difference:
            difference = _find_missing_figure(first_figures, second_figures)
        lines.append(Line("figures", not difference, difference or f"equal: {len(first_figures)}"))
    first_names = find_files(first, pattern)
    second_names = find_files(second, pattern)
    if first_names or second_names:
        lines.append(_compare_weights(first, second, first_names, second_names))
    return lines


def _find_foreign(folder: str) -> str:
    """Return which kept checkpoint of a run is one of another run, in words; "" if none is."""
    if not os.path.isdir(os.path.join(folder, CHECKPOINTS)):
        return ""
    from bootfile.exact import recorded  # imports torch, which records do not need

    return recorded.find_foreign(folder)


def compare_receipts(first: str, second: str) -> tuple[bool, str]:
    """Return (whether the samples of two runs are equal, one line about it). Raises BadInput."""
    first_name = find_receipt(first)
    second_name = find_receipt(second)
    if first_name != second_name:
        return False, f"only one run has {first_name or second_name}"
    with bad_input():
        return compare(read(first), read(second))


def compare_states(first: str, second: str) -> tuple[bool, str]:
    """Return (whether the states of two runs are equal where they should be, one line about them).

    first, second: output folders. States are compared at the steps whose digest both runs have. Raises
    BadInput.
    """
    # a state of another run in a folder may have been continued: then the records are not those of one run
    foreign = _find_foreign(first) or _find_foreign(second)
    return (False, foreign) if foreign else _compare_digests(first, second)


def _compare_digests(first: str, second: str) -> tuple[bool, str]:
    """Return compare_states() of the lines of state.jsonl."""
    first_lines = digest_lines.read(first, whole=True)
    second_lines = digest_lines.read(second, whole=True)
    # a killed run has digests at other steps than an undisturbed one: its last save is another one
    common = sorted(first_lines.keys() & second_lines.keys())
    if not common:
        return True, "not compared: the runs have no digest of the same step (a checkpoint or an epoch's end)"
    steps = []
    other_forms = []  # steps whose digests were computed in two ways: a run began before an update
    for step in common:
        if _form(first_lines[step]) == _form(second_lines[step]):
            steps.append(step)
        else:
            other_forms.append(step)
    note = ""
    if other_forms:
        note = (
            f"not comparable at {_name_steps(other_forms)}: digests of an earlier version, and of a later one"
        )
        if not steps:
            return True, note
        note = f"; {note}"  # it follows the result of the other steps

    different = []
    equal = []
    for step in steps:
        if first_lines[step]["digest"] == second_lines[step]["digest"]:
            equal.append(step)
        else:
            different.append(step)
    equal_text = f"equal at {_name_steps(equal)}{note}"
    first_shards = read_setting(first, "exact_shards")
    second_shards = read_setting(second, "exact_shards")
    is_exact = first_shards is not None and first_shards == second_shards
    if not different:
        figure = ""
        if is_exact:  # equal weights have equal figures of evaluations, at any number of processes
            figure = _find_other_figure(_read_figures(first, "val_"), _read_figures(second, "val_"))
        return (False, f"{equal_text}; {figure}") if figure else (True, equal_text)

    # the first one: differences at later steps follow from it
    step = different[0]
    runs = first, second
    lines = first_lines[step], second_lines[step]
    text = f"differs at {step}"
    cause = compare_machines(runs, *lines)
    if cause:
        text += f"; {cause}"
    text += f": {_describe(step, runs, lines)}"
    if equal:
        text = f"{equal_text}; {text}"
    else:
        text += note
    first_size = _world_size(first)
    second_size = _world_size(second)
    # exact shards promise equal states at any number of processes; without them sums are rounded otherwise
    is_expected = first_size != second_size and not is_exact
    if is_expected:
        text += (
            f"; expected: {first_size} and {second_size} processes round sums, and draw numbers, differently"
        )
    return is_expected, text


def compare_machines(runs: tuple[str, str], first: dict[str, Any], second: dict[str, Any]) -> str:
    """Return the first difference between what computed two states, in words; "" without one, or if a version
    before 0.30 wrote them. first, second: their lines of state.jsonl."""
    first_machines = _read_machines(first)
    second_machines = _read_machines(second)
    if not first_machines or not second_machines:
        return ""
    return first_difference(runs, first_machines, second_machines)


def _read_machines(line: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the machines in a line of state.jsonl, without damaged ones; [] if it has none."""
    machines = line.get("machines")
    if not isinstance(machines, list):
        return []
    return [machine for machine in machines if isinstance(machine, dict)]


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
    figures: _Figures = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith(start) and not _NO_FIGURES.fullmatch(name):
                figures[line.get("step"), name] = str(value)
    return figures


def _find_other_figure(first: _Figures, second: _Figures) -> str:
    """Return the first figure that differs, in words; "" without one. A figure that only one run has does not
    differ."""
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


def _name_steps(steps: list[int]) -> str:
    """Return "step 4" or "steps 4, 8"; of eight steps or more the first and the last three."""
    if not steps:
        return "no step"
    if len(steps) == 1:
        return f"step {steps[0]}"
    shown = [*map(str, steps)]
    if len(steps) >= 8:
        shown = [*shown[:3], "...", *shown[-3:]]
    return f"steps {', '.join(shown)}"


def _describe(step: int, runs: tuple[str, str], lines: tuple[dict[str, Any], dict[str, Any]]) -> str:
    """Return the name of the part that differs most, and by how much if both checkpoints still exist. lines:
    those of the step in state.jsonl of both runs."""
    first_parts = lines[0]["parts"]
    second_parts = lines[1]["parts"]
    names = []
    for name in sorted(first_parts.keys() | second_parts.keys()):
        if first_parts.get(name) != second_parts.get(name):
            names.append(name)
    names.sort(key=find_kind)  # a learning rate is a cause, and the weights are its effects
    if not names:
        return "a part that has no digest of its own"
    others = f", and {len(names) - 1} more" if len(names) > 1 else ""
    sizes = _find_differences(runs, step, names)
    if not sizes:
        return f"{names[0]}{others} (by how much: keep the checkpoints of both runs)"
    name = names[0]
    # the part that differs most, among those of the first kind
    for other in names[1:]:
        if find_kind(other) == find_kind(name) and sizes[other] > sizes[name]:
            name = other
    return f"{name}{others} (largest relative difference {sizes[name]:.1g})"


def _find_differences(runs: tuple[str, str], step: int, names: list[str]) -> dict[str, float]:
    """Return how much these parts of the checkpoints of a step differ; {} if a checkpoint cannot be read."""
    from bootfile.exact import digest, files  # import torch, which records do not need

    states = []
    for run in runs:
        path = os.path.join(run, "checkpoints", files.name_of(step))
        try:
            states.append(dict(digest.leaves(files.read(path)["objects"])))
        except (files.Refused, KeyError, TypeError, AttributeError):  # most jobs keep the newest ones only
            return {}
    first_state, second_state = states
    return {name: _difference(first_state.get(name), second_state.get(name)) for name in names}


def _difference(first: object, second: object) -> float:
    """Return the largest difference of two values, relative to the largest number; inf if they have none."""
    import torch

    try:
        # in float64: a difference of float32 numbers may be lost in float32
        first_numbers = torch.as_tensor(first).double()
        second_numbers = torch.as_tensor(second).double()
        largest = torch.maximum(first_numbers.abs().max(), second_numbers.abs().max())
        return float((first_numbers - second_numbers).abs().max() / largest)
    except (TypeError, ValueError, RuntimeError):  # a part that one run lacks, text, or another shape
        return float("inf")


def read_setting(run: str, name: str) -> object:
    """Return an option of a run, as its last start had it; None if it is not known."""
    known = starts.read(run, whole=True)
    return known[-1]["settings"].get(name) if known else None


def _world_size(run: str) -> int:
    """Return the largest number of processes that a start of a run had; 1 if no start is known."""
    largest = 1
    for start in starts.read(run, whole=True):
        size = start["environment"].get("world size", 1)
        if isinstance(size, int):  # else a user has edited the line
            largest = max(largest, size)
    return largest


def _compare_weights(first: str, second: str, first_names: list[str], second_names: list[str]) -> Line:
    """Compare the files of weights of two runs, tensor by tensor. first, second: output folders.
    first_names, second_names: the paths of their files below them, sorted. Raises BadInput.

    compare_runs() calls it, for `prove`, after each case of a proof."""
    from bootfile.receipt import weights  # imports torch, which records do not need

    if first_names != second_names:
        missing = set(first_names) ^ set(second_names)
        return Line("weights", False, f"only one run has {min(missing)}")
    differences = weights.find_differences(first, second, first_names)
    if differences:
        return Line("weights", False, weights.describe(differences))
    plural = "s" if len(first_names) > 1 else ""
    return Line("weights", True, f"equal in {len(first_names)} file{plural}")


def find_files(folder: str, pattern: str) -> list[str]:
    """Return the paths, below the folder, of the files that match the pattern."""
    paths = glob.glob(os.path.join(glob.escape(folder), pattern), recursive=True)
    return sorted(os.path.relpath(path, folder) for path in paths if os.path.isfile(path))
