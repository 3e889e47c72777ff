"""Compare what two runs left: the samples of each step, the state at each checkpoint, files of weights."""

import glob
import os
from typing import NamedTuple

from common.checkpoint import digest, files
from common.ground.exits import BadInput
from datasets.sampling import loop_receipt, receipt
from launch.receipt import compare, compare_states


class Line(NamedTuple):
    """One comparison. part: PARTS. text: its result in words."""

    part: str
    text: str
    equal: bool


PARTS = ("data", "state", "weights")


def compare_runs(first: str, second: str, pattern: str) -> list[Line]:
    """Compare two output folders, each part that they have. pattern: of the files of weights below a folder.
    Raises BadInput."""
    lines = []
    if any(os.path.exists(os.path.join(folder, receipt.FILE)) for folder in (first, second)):
        equal, text = compare(receipt.read(first), receipt.read(second))
        lines.append(Line("data", text, equal))
    elif os.path.exists(os.path.join(first, loop_receipt.FILE.format(0))):
        try:
            equal, text = loop_receipt.compare(loop_receipt.read(first), loop_receipt.read(second))
        except loop_receipt.ReceiptError as error:
            raise BadInput(str(error)) from error
        lines.append(Line("data", text, equal))
    if digest.read(first) or digest.read(second):
        equal, text = compare_states(first, second)
        lines.append(Line("state", text, equal))
    names = [find_files(folder, pattern) for folder in (first, second)]
    if any(names):
        lines.append(_compare_weights(first, second, *names))
    return lines


def _compare_weights(first: str, second: str, ours: list[str], theirs: list[str]) -> Line:
    if ours != theirs:
        return Line("weights", f"only one run has {min(set(ours) ^ set(theirs))}", False)
    for name in ours:
        one, other = (_read(os.path.join(folder, name)) for folder in (first, second))
        parts = [part for part in sorted(one | other) if one.get(part) != other.get(part)]
        if parts:
            more = f", and {len(parts) - 1} more" if len(parts) > 1 else ""
            return Line("weights", f"{name} differs: {parts[0]}{more}", False)
    return Line("weights", f"equal in {len(ours)} file{'s' * (len(ours) > 1)}", True)


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
