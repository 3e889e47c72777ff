"""The file of a run's digests of its state (digest.py), which is read and compared without torch.

{"step": 44, "format": 2, "digest": "9f3c...", "parts": {...}, "run": "1b2e...", ...}    a state
{"file": "best.pth", "size": 4711, "sum": "77aa..."}                                     weights
"""

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
    by_step = {}
    for line in _read(folder, whole):
        if _is_state(line):
            by_step[line["step"]] = line | {"digest": str(line["digest"])}
    return dict(sorted(by_step.items()))


def read_files(folder: str) -> dict[str, list[tuple[int, str]]]:
    """Return (size in bytes, sum) of each version of the files of weights in FILE, by their names. Raises
    BadInput."""
    versions: dict[str, list[tuple[int, str]]] = {}
    for line in _read(folder):
        if _is_file(line):
            versions.setdefault(line["file"], []).append((line["size"], line["sum"]))
    return versions


def _is_state(line: dict[str, Any]) -> bool:
    """Return whether a line is one of summarize()."""
    return type(line.get("step")) is int and isinstance(line.get("parts"), dict) and "digest" in line


def _is_file(line: dict[str, Any]) -> bool:
    types = {"file": str, "size": int, "sum": str}
    return all(type(line.get(name)) is kind for name, kind in types.items())


def _read(folder: str, whole: bool = False) -> list[dict[str, Any]]:
    path = os.path.join(folder, FILE)
    with explained(f"{path} cannot be read"):
        return read_json_lines(path, _MOST, whole)


def cut(folder: str, step: int) -> None:
    """Delete the lines of states after `step`, which a resumed run writes again, and those that a kill has
    cut. The lines of files stay, as the files do. Raises OSError."""
    path = os.path.join(folder, FILE)
    kept: dict[Any, dict[str, Any]] = {}  # (place of a line of a file) or (step) -> line
    for place, line in enumerate(_read(folder)):
        if _is_file(line):
            kept["file", place] = line
        elif _is_state(line) and line["step"] <= step:
            kept.pop(line["step"], None)  # the last one of a step counts
            kept[line["step"]] = line
    text = "".join(json.dumps(line) + "\n" for line in kept.values())
    # most starts have nothing to cut: then the file is not written again
    if os.path.exists(path) and read_file(path, _MOST) != text.encode():
        write_atomic(path, text)
