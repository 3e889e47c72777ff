"""The file of a run's digests of its state (digest.py), which is read and compared without torch."""

import json
import os
from typing import Any

from bootfile.ground.files import append_json_line, explained, read_file, read_json_lines, write_atomic

FILE = "state.jsonl"  # in a run's output folder
_MOST = 2**30  # bytes of FILE


def write(folder: str, line: dict[str, Any]) -> None:
    """Append a line to FILE. Raises OSError."""
    append_json_line(os.path.join(folder, FILE), line)


def read(folder: str, whole: bool = False) -> dict[int, dict[str, Any]]:
    """Return the lines of FILE by step, the last one of each step; {} without the file. whole: raise BadInput
    if lines are damaged. Raises BadInput."""
    path = os.path.join(folder, FILE)
    with explained(f"{path} cannot be read"):
        lines = read_json_lines(path, _MOST, whole)
    by_step = {}
    for line in lines:
        # a line without these is not one of summarize(), and is left out
        is_whole = type(line.get("step")) is int and isinstance(line.get("parts"), dict)
        if is_whole and "digest" in line:
            by_step[line["step"]] = line | {"digest": str(line["digest"])}
    return dict(sorted(by_step.items()))


def cut(folder: str, step: int) -> None:
    """Delete the lines after `step`, which a resumed run writes again, and those that a kill has cut. Raises
    OSError."""
    path = os.path.join(folder, FILE)
    lines = read(folder)
    kept = "".join(json.dumps(line) + "\n" for number, line in lines.items() if number <= step)
    # most starts have nothing to cut: then the file is not written again
    if os.path.exists(path) and read_file(path, _MOST) != kept.encode():
        write_atomic(path, kept)
