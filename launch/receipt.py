"""Compare the data of two runs: samples, labels and crops of every step.

    python -m launch receipt RUN_A RUN_B

RUN_A and RUN_B: output folders of runs, at any world size, with any loader, restarted or not. Exit codes: 0
equal; 1 different (the output names the first epoch and step that differ, and whether ids, labels or
augmentation differ) or one run is shorter; 2 a receipt cannot be read.
"""

import numpy as np

from common.arguments import Parser
from datasets.sampling import receipt


def main(arguments: list[str]) -> int:
    """Print the comparison and return the exit code. Raises BadInput."""
    parser = Parser(__doc__)
    parser.prog = "python -m launch receipt"
    parser.add_argument("run_a", metavar="RUN_A", help="output folder of a run")
    parser.add_argument("run_b", metavar="RUN_B", help="output folder of another run")
    args = parser.parse_args(arguments)
    runs = {path: receipt.read(path) for path in (args.run_a, args.run_b)}
    for path, records in runs.items():
        missing = int(records["step"][-1]) - len(records)
        lost = f", {missing} without a record" if missing else ""
        print(f"{path}: {records['step'][-1]} steps, {records['epoch'][-1]} epochs{lost}")
    equal, text = compare(runs[args.run_a], runs[args.run_b])
    print(text)
    return 0 if equal else 1


def compare(first: np.ndarray, second: np.ndarray) -> tuple[bool, str]:
    """Return (whether two results of datasets.sampling.receipt.read() are equal, one line about it)."""
    found = receipt.compare(first, second)
    if found.parts:
        return False, f"different from epoch {found.epoch}, step {found.step} on: {', '.join(found.parts)}"
    if not found.steps:
        return False, "the runs have no step in common"
    if len(first) != len(second):
        short = min(first, second, key=len)
        end = f"epoch {short['epoch'][-1]}, step {short['step'][-1]}"
        return False, f"equal in the {found.steps} steps of both; one ends at {end}"
    return True, f"equal: {found.steps} steps, the same ids, labels and augmentation"
