"""Compare what two runs left: the samples of each step, the state at each checkpoint, files of weights."""

import glob
import os
from typing import NamedTuple

from common.checkpoint import digest, files
from common.ground.exits import BadInput
from datasets.sampling import loop_receipt, receipt
from launch.receipt import compare, compare_states

NONE, FAILED = "none", "failed"


class Evidence(NamedTuple):
    """Lines about data, states and files of weights, NONE if a run has none, and whether each is equal."""

    data: str
    state: str
    weights: str
    equal: tuple[bool, bool, bool]


def compare_runs(first: str, second: str, pattern: str) -> Evidence:
    """Compare two output folders. pattern: of the files of weights below a folder. Raises BadInput."""
    data, same_data = _compare_data(first, second)
    same_state, state = True, NONE
    if digest.read(first) or digest.read(second):
        same_state, state = compare_states(first, second)
    weights, same_weights = _compare_weights(first, second, pattern)
    return Evidence(data, state, weights, (same_data, same_state, same_weights))


def _compare_data(first: str, second: str) -> tuple[str, bool]:
    own = [os.path.exists(os.path.join(folder, receipt.FILE)) for folder in (first, second)]
    if any(own):
        equal, text = compare(receipt.read(first), receipt.read(second))
        return text, equal
    if not os.path.exists(os.path.join(first, loop_receipt.FILE.format(0))):
        return NONE, True
    try:
        equal, text = loop_receipt.compare(loop_receipt.read(first), loop_receipt.read(second))
    except loop_receipt.ReceiptError as error:
        raise BadInput(str(error)) from error
    return text, equal


def _compare_weights(first: str, second: str, pattern: str) -> tuple[str, bool]:
    names = [find_files(folder, pattern) for folder in (first, second)]
    if not names[0] and not names[1]:
        return NONE, True
    if names[0] != names[1]:
        only = sorted(set(names[0]) ^ set(names[1]))
        return f"only one run has {only[0]}", False
    for name in names[0]:
        parts = [_read(os.path.join(folder, name)) for folder in (first, second)]
        other = [part for part in sorted(parts[0] | parts[1]) if parts[0].get(part) != parts[1].get(part)]
        if other:
            more = f", and {len(other) - 1} more" if len(other) > 1 else ""
            return f"{name} differs: {other[0]}{more}", False
    return f"equal in {len(names[0])} file{'s' * (len(names[0]) > 1)}", True


def find_files(folder: str, pattern: str) -> list[str]:
    """Return the paths, below the folder, of the files that match the pattern."""
    paths = glob.glob(os.path.join(glob.escape(folder), pattern), recursive=True)
    return sorted(os.path.relpath(path, folder) for path in paths if os.path.isfile(path))


def _read(path: str) -> dict[str, str]:
    """Return a digest of each tensor and number in a file. Raises BadInput."""
    try:
        return digest.summarize(0, files.load(path))["parts"]
    except files.Refused as reason:
        raise BadInput(f"{path} cannot be compared: {reason}") from reason


def damage(state: dict) -> str:
    """Change the largest tensor of floating-point numbers in a state by 1.6 %; return its name, or ""."""
    numbers = [
        (each.numel(), name, each)
        for name, each in digest.leaves(state)
        if hasattr(each, "is_floating_point") and each.is_floating_point() and each.numel()
    ]
    if not numbers:
        return ""
    _, name, largest = max(numbers, key=lambda each: each[:2])
    largest.mul_(1 + 2**-6)
    return name
