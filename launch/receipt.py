"""Compare two runs: the data of every step, and the state (weights, buffers, optimizer) at checkpoints.

    python -m launch receipt RUN_A RUN_B
    python -m launch receipt RUN            a receipt of `launch new --receipt`: what each restart read

RUN_A and RUN_B: output folders of runs, at any world size, with any loader, restarted or not; or folders of
the receipt that `python -m launch new --receipt` adds to any loop. Exit codes: 0 equal; 1 the data differ
(the output names the first epoch and step, and what differs), one run is shorter, or the states differ at the
same number of processes or with the same --exact_shards; 2 a receipt cannot be read, or the runs have
different seeds. Without --exact_shards another number of processes rounds sums differently, so different
states are expected.
"""

import os

import numpy as np
import torch

from common.console.arguments import Parser
from common.exact import digest, files
from common.ground.exits import BadInput, printable
from common.ground.files import explained, read_json_lines
from common.run import starts
from datasets.sampling import loop_receipt, receipt

_MOST = 2**30  # bytes of metrics.jsonl


def main(arguments: list[str]) -> int:
    """Print the comparison and return the exit code. Raises BadInput."""
    parser = Parser(__doc__, "python -m launch receipt")
    parser.add_argument("run_a", metavar="RUN_A", help="output folder of a run")
    parser.add_argument("run_b", metavar="RUN_B", nargs="?", help="output folder of another run")
    args = parser.parse_args(arguments)
    paths = [path for path in (args.run_a, args.run_b) if path is not None]
    if all(os.path.exists(os.path.join(path, loop_receipt.FILE.format(0))) for path in paths):
        return _report_loops(paths)
    if args.run_b is None:
        raise BadInput("expected RUN_A RUN_B: one run is enough only for a receipt of `launch new --receipt`")
    runs = {path: receipt.read(path) for path in (args.run_a, args.run_b)}
    seeds = [_setting(path, "seed") for path in paths]
    if None not in seeds and seeds[0] != seeds[1]:
        raise BadInput(f"the runs have the seeds {seeds[0]} and {seeds[1]}: their samples differ by design")
    for path, records in runs.items():
        steps, epochs = int(records["step"][-1]), int(records["epoch"][-1])
        lost = f", {steps - len(records)} without a record" if steps > len(records) else ""
        print(f"{path}: {steps} steps, {epochs} epoch{'s' * (epochs != 1)}{lost}")
    equal, text = compare(runs[args.run_a], runs[args.run_b])
    print(f"data {text}")
    same_state, text = compare_states(args.run_a, args.run_b)
    print(printable(f"state {text}"))
    return 0 if equal and same_state else 1


def _report_loops(paths: list[str]) -> int:
    try:
        equal, lines = loop_receipt.report(paths)
    except loop_receipt.ReceiptError as error:
        raise BadInput(str(error)) from error
    print(*map(printable, lines), sep="\n")
    return 0 if equal else 1


def compare(first: np.ndarray, second: np.ndarray) -> tuple[bool, str]:
    """Return (whether two results of datasets.sampling.receipt.read() are equal, one line about it)."""
    difference = receipt.compare(first, second)
    if difference.parts:
        return (
            False,
            f"different from epoch {difference.epoch}, step {difference.step} on: "
            f"{', '.join(difference.parts)}",
        )
    if not difference.steps:
        return False, "different: the runs have no step in common"
    if len(first) != len(second):
        short = min(first, second, key=len)
        end = f"epoch {short['epoch'][-1]}, step {short['step'][-1]}"
        return False, f"equal in the {difference.steps} steps of both; one ends at {end}"
    return True, f"equal for {difference.steps} steps: the same ids, labels and augmentation"


def compare_states(first: str, second: str) -> tuple[bool, str]:
    """Return (whether the states of two runs are equal where they should be, one line about them).

    first, second: output folders. States are compared at the steps whose digest both runs have. Raises
    BadInput.
    """
    lines = digest.read(first, whole=True), digest.read(second, whole=True)
    steps = sorted(lines[0].keys() & lines[1].keys())
    if not steps:
        return True, "not compared: the runs have no digest of the same step (a checkpoint or an epoch's end)"
    different = [step for step in steps if lines[0][step]["digest"] != lines[1][step]["digest"]]
    equal = f"equal at {_numbers([step for step in steps if step not in different])}"
    shards = [_setting(run, "exact_shards") for run in (first, second)]
    is_exact = shards[0] is not None and shards[0] == shards[1]
    if not different:
        figure = _find_other_figure(first, second) if is_exact else ""
        return not figure, f"{equal}; {figure}" if figure else equal
    step = different[0]
    text = f"differs at {step}: {_describe(step, (first, second), (lines[0][step], lines[1][step]))}"
    text = f"{equal}; {text}" if len(different) < len(steps) else text
    sizes = [_world_size(run) for run in (first, second)]
    is_expected = sizes[0] != sizes[1] and not is_exact
    if is_expected:
        text += f"; expected: {sizes[0]} and {sizes[1]} processes round sums, and draw numbers, differently"
    return is_expected, text


def _find_other_figure(*runs: str) -> str:
    """Return the first figure of an evaluation that differs; "" without one."""
    figures: list[dict] = []
    for path in (os.path.join(run, "metrics.jsonl") for run in runs):
        with explained(f"{path} cannot be read"):
            lines = read_json_lines(path, _MOST)
        named = ((line.get("step"), name, each) for line in lines for name, each in line.items())
        figures.append({(step, name): str(each) for step, name, each in named if name.startswith("val_")})
    for (step, name), value in figures[0].items():
        if value != figures[1].get((step, name), value):
            return f"{name} differs at step {step}: {value} and {figures[1][step, name]}"
    return ""


def _numbers(steps: list[int]) -> str:
    if not steps:
        return "no step"
    shown = steps if len(steps) < 8 else [*steps[:3], "...", *steps[-3:]]
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, shown))}"


def _describe(step: int, runs: tuple[str, str], lines: tuple[dict, dict]) -> str:
    """Return the name of the part that differs most, and by how much if both checkpoints still exist."""
    theirs, ours = (line["parts"] for line in lines)
    names = [name for name in sorted(theirs.keys() | ours.keys()) if theirs.get(name) != ours.get(name)]
    others = f", and {len(names) - 1} more" if len(names) > 1 else ""
    if not names:
        return "a part that has no digest of its own"
    paths = [os.path.join(run, "checkpoints", files.name_of(step)) for run in runs]
    try:
        states = [dict(digest.leaves(files.read(path)["objects"])) for path in paths]
    except (files.Refused, KeyError, TypeError, AttributeError):
        return f"{names[0]}{others} (the checkpoints of both runs would give the size)"
    sizes = {name: _difference(*(state.get(name) for state in states)) for name in names}
    name = max(names, key=lambda each: sizes[each])
    return f"{name}{others} (largest relative difference {sizes[name]:.1g})"


def _difference(one: object, other: object) -> float:
    """Return the largest difference of two values, relative to the largest number; inf if they have none."""
    try:
        one, other = (torch.as_tensor(each).double() for each in (one, other))
        return float((one - other).abs().max() / torch.maximum(one.abs().max(), other.abs().max()))
    except (TypeError, ValueError, RuntimeError):  # a part that one run lacks, text, or another shape
        return float("inf")


def _setting(run: str, name: str) -> object:
    """Return an option of a run, as its last start had it; None if it is not known."""
    return next((start["settings"].get(name) for start in reversed(starts.read(run, whole=True))), None)


def _world_size(run: str) -> object:
    sizes = [start["environment"].get("world size", 1) for start in starts.read(run, whole=True)]
    return max((size for size in sizes if isinstance(size, int)), default=1)
