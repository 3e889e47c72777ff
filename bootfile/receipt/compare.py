"""Compare what two runs left: samples of the steps, states at checkpoints, figures, files of weights."""

import glob
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bootfile.exact.kinds import find_kind
from bootfile.ground.numbers import counted
from bootfile.ground.results import CHECKPOINTS
from bootfile.histories import read_states, world_size_of
from bootfile.machine.differences import find_differences, in_words, without_step
from bootfile.receipt.reading import find_receipt, read
from bootfile.receipt.steps import compare
from bootfile.records import METRICS, read_lines, read_starts

# times, memory, ranks and lost processes, in which equal runs differ, and digests of the data and the state
_NO_FIGURES = re.compile(
    r"(.*_)?(time|seconds|per_s|s|ms|mb)|generations|lost_processes|useful_share|ranks|receipt|states"
)
_Figures = dict[tuple[Any, str], str]  # (step, name) -> value
_State = dict[str, Any]  # a line of state.jsonl


class Line(NamedTuple):
    """One comparison. part: one of PARTS. text: its result in words."""

    part: str
    equal: bool
    text: str


PARTS = ("data", "state", "figures", "weights")


def compare_runs(first: str, second: str, pattern: str) -> list[Line]:
    """Compare two output folders, each part that one of them has: a part that only one has is a difference.

    `prove` calls it with the reference and the folder of a case. pattern: of the files of weights below a
    folder. Raises BadInput.
    """
    lines = []
    if find_receipt(first) or find_receipt(second):
        lines.append(Line("data", *compare_receipts(first, second)))
    if read_states(first) or read_states(second):
        lines.append(Line("state", *compare_states(first, second)))
    if read_starts(first) or read_starts(second):  # a script without Bootfile has no figures that we know
        figures = _read_figures(first), _read_figures(second)
        both = figures[0].keys() & figures[1].keys()
        missing = [key for figures_of_run in figures for key in figures_of_run if key not in both]
        texts = [f"only one run has {name} at step {step}" for step, name in missing]
        difference = _find_other_figure(*figures) or next(iter(texts), "")
        lines.append(Line("figures", not difference, difference or f"equal: {len(figures[0])}"))
    names = [find_files(run, pattern) for run in (first, second)]
    if any(names):
        lines.append(Line("weights", *_compare_weights(first, second, *names)))
    return lines


def compare_receipts(first: str, second: str) -> tuple[bool, str]:
    """Return (whether the samples of two runs are equal, one line about it). Raises BadInput."""
    first_name = find_receipt(first)
    second_name = find_receipt(second)
    if first_name != second_name:
        return False, f"only one run has {first_name or second_name}"
    return compare(read(first), read(second))


def compare_states(first: str, second: str) -> tuple[bool, str]:
    """Return (whether the states of two runs are equal where they should be, one line about them).

    first, second: output folders. States are compared at the steps whose digest both runs have. Raises
    BadInput.
    """
    runs = first, second
    # a state of another run in a folder may have been continued: then the records are not those of one run
    foreign = _find_foreign(first) or _find_foreign(second)
    if foreign:
        return False, foreign
    first_lines, second_lines = (read_states(run, whole=True) for run in runs)
    # a killed run has digests at other steps than an undisturbed one: its last save is another one
    steps = sorted(first_lines.keys() & second_lines.keys())
    if not steps:
        return True, "not compared: the runs have no digest of the same step (a checkpoint or an epoch's end)"
    different = [step for step in steps if first_lines[step]["digest"] != second_lines[step]["digest"]]
    equal = [step for step in steps if step not in different]
    equal_text = f"equal at {_name_steps(equal)}"
    shards = [read_setting(run, "exact_shards") for run in runs]
    is_exact = shards[0] is not None and shards[0] == shards[1]
    if not different:
        # with exact shards, equal weights have equal figures of evaluations at any number of processes
        figures = (_read_figures(run, "val_") if is_exact else {} for run in runs)
        figure = _find_other_figure(*figures)
        return not figure, f"{equal_text}; {figure}" if figure else equal_text
    # the first one: differences at later steps follow from it
    step = different[0]
    lines = first_lines[step], second_lines[step]
    cause = first_difference(runs, *(line.get("machines", []) for line in lines))
    text = f"differs at {step}{f'; {cause}' if cause else ''}: {_describe(step, runs, lines)}"
    text = f"{equal_text}; {text}" if equal else text
    sizes = [max(map(world_size_of, read_starts(run, whole=True)), default=1) for run in runs]
    # exact shards promise equal states at any number of processes; without them sums are rounded otherwise
    if sizes[0] == sizes[1] or is_exact:
        return False, text
    return True, (
        f"{text}; expected: {sizes[0]} and {sizes[1]} processes round sums, and draw numbers, differently"
    )


def _find_foreign(folder: str) -> str:
    """Return which kept checkpoint of a run is one of another run, in words; "" if none is."""
    if not os.path.isdir(os.path.join(folder, CHECKPOINTS)):
        return ""
    from bootfile.exact import recorded  # imports torch, which records do not need

    return recorded.find_foreign(folder)


def _read_figures(run: str, start: str = "") -> _Figures:
    """Return the figures of a job of Bootfile, without times and memory. start: the beginning of their names,
    "val_" for an evaluation."""
    lines = read_lines(run, METRICS, whole=True)
    figures = {(line.get("step"), name): str(value) for line in lines for name, value in line.items()}
    return {
        key: value
        for key, value in figures.items()
        if key[1].startswith(start) and not _NO_FIGURES.fullmatch(key[1])
    }


def _find_other_figure(first: _Figures, second: _Figures) -> str:
    """Return the first figure that differs, in words; "" without one. A figure that only one run has does not
    differ."""
    for (step, name), value in first.items():
        if value != second.get((step, name), value):
            return f"{name} differs at step {step}: {value} and {second[step, name]}"
    return ""


def _name_steps(steps: list[int]) -> str:
    """Return "step 4" or "steps 4, 8"; of eight steps or more the first and the last three."""
    shown = [*map(str, steps)]
    if len(steps) >= 8:
        shown = [*shown[:3], "...", *shown[-3:]]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown)}"


def _describe(step: int, runs: tuple[str, str], lines: tuple[_State, _State]) -> str:
    """Return the name of the part that differs most, and by how much if both checkpoints still exist. lines:
    those of the step in state.jsonl of both runs."""
    from bootfile.exact import (  # they import torch, which records do not need
        checked_files,
        digest,
        files,
        recorded,
    )

    names = recorded.find_changed(*lines)
    if not names:
        return "a part that has no digest of its own"
    others = f", and {len(names) - 1} more" if len(names) > 1 else ""
    paths = [os.path.join(run, CHECKPOINTS, files.name_of(step)) for run in runs]
    try:
        states = [dict(digest.leaves(checked_files.read(path)["objects"])) for path in paths]
    except files.Refused:  # most jobs keep the newest ones only
        return f"{names[0]}{others} (by how much: keep the checkpoints of both runs)"
    sizes = {name: _difference(states[0].get(name), states[1].get(name)) for name in names}
    causes = [name for name in names if find_kind(name) == find_kind(names[0])]
    name = max(causes, key=sizes.__getitem__)
    return f"{name}{others} (largest relative difference {sizes[name]:.1g})"


def _difference(first: object, second: object) -> float:
    """Return the largest difference of two values, relative to the largest number; inf if they have none."""
    import torch

    try:
        # in 64 bits: a difference of float32 numbers may be lost in float32
        numbers = torch.stack([torch.as_tensor(first), torch.as_tensor(second)])
        numbers = numbers.to(torch.promote_types(numbers.dtype, torch.float64))
        difference = (numbers[0] - numbers[1]).abs().max()
        return float(difference / numbers.abs().max()) if difference else 0.0  # 0 and -0
    except (TypeError, ValueError, RuntimeError):  # a part that one run lacks, text, or another shape
        return float("inf")


def read_setting(run: str, name: str) -> object:
    """Return an option of a run, as its last start had it; None if it is not known."""
    starts = read_starts(run, whole=True)
    return starts[-1]["settings"].get(name) if starts else None


def _compare_weights(first: str, second: str, *names: list[str]) -> tuple[bool, str]:
    """Return (whether the files of weights of two runs are equal, one line), tensor by tensor. names: the
    paths of their files below the folders. Raises BadInput."""
    from bootfile.receipt import weights  # imports torch, which records do not need

    missing = {*names[0]} ^ {*names[1]}
    if missing:
        return False, f"only one run has {min(missing)}"
    if differences := weights.find_differences(first, second, names[0]):
        return False, weights.describe(differences)
    return True, f"equal in {counted(len(names[0]), 'file')}"


def find_files(folder: str, pattern: str) -> list[str]:
    """Return the paths, below the folder, of the files that match the pattern."""
    paths = glob.glob(os.path.join(glob.escape(folder), pattern), recursive=True)
    return sorted(os.path.relpath(path, folder) for path in paths if os.path.isfile(path))


def first_difference(
    names: tuple[str, str], first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> str:
    """Return the first difference between the machines of two runs, in words; "" if there is none.

    names: of the runs. first, second: `machines` of their states, the facts of each machine that has computed
    with its first step ("step"), the last one at the end (bootfile/exact/machines.py).
    """
    first_run, second_run = names
    for first_machine, second_machine in zip(first, second, strict=False):
        for name, here, there in find_differences(without_step(first_machine), without_step(second_machine)):
            now, other = in_words(name, here), in_words(name, there)
            return f"{first_run} computed with {now}, {second_run} with {other}"
    # one run may have computed on more machines, one after the other
    for run, longer, shorter in ((first_run, first, second), (second_run, second, first)):
        for machine in longer[len(shorter) :]:
            for name, before, now in find_differences(without_step(longer[0]), without_step(machine)):
                return (
                    f"{run} computed with {in_words(name, before)} first, and with {in_words(name, now)} "
                    f"from step {machine.get('step')} on"
                )
    return ""
