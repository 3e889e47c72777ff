"""Read and write the files of lines in the output folder of a run. Every program uses these functions.

    starts.jsonl    a line for each start, with a step, settings and environment (common/run/starts.py)
    state.jsonl     a line for each state that was saved (exact/digest.py), and for each file of weights
    shards.jsonl    a line for each step: the sums of the gradients of each shard, of a job with --recheck
    metrics.jsonl, ends.jsonl    a line for each report; for the begin and the end of each start

A missing file has no lines. A file that cannot be read raises BadInput. Lines that a kill has cut, or that
are damaged, are left out; a verdict passes whole=True, and is refused with their number. JSON objects of
another form than those above are left out. histories.py reads what they say of a run that has begun. Other
files of a run: its receipt (bootfile/receipt), and the ids of the samples that no batch of it has
(bootfile/sampling/removal.py).
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from bootfile.ground.errors import BadInput
from bootfile.ground.files import (
    append_json_line,
    explained,
    parse_json_lines,
    read_file,
    write_atomic,
)

STARTS = "starts.jsonl"
STATES = "state.jsonl"
SHARDS = "shards.jsonl"
METRICS = "metrics.jsonl"
MOST = 2**30  # bytes of a file


def read_counted(folder: str, name: str) -> tuple[list[dict[str, Any]], int]:
    """Return the objects in a file of JSON lines, and how many lines are cut or damaged. Raises BadInput."""
    path = os.path.join(folder, name)
    content = b""
    with explained(f"{path} cannot be read"), contextlib.suppress(FileNotFoundError):
        content = read_file(path, MOST)
    objects = parse_json_lines(content)
    return objects, sum(bool(line.strip()) for line in content.split(b"\n")) - len(objects)


def read_lines(folder: str, name: str, whole: bool = False) -> list[dict[str, Any]]:
    """Return the objects in a file of JSON lines. whole: lines may not be damaged. Raises BadInput."""
    objects, damaged = read_counted(folder, name)
    if whole and damaged:
        raise BadInput(
            f"{os.path.join(folder, name)}: {damaged} of {damaged + len(objects)} lines are cut or damaged: "
            "delete them to use the others"
        )
    return objects


def cut(folder: str, name: str, kept: Iterable[Mapping[str, Any]]) -> None:
    """Replace the lines of a file. Most starts have nothing to cut: then it is not written again."""
    path = os.path.join(folder, name)
    text = "".join(json.dumps(line) + "\n" for line in kept)
    if os.path.exists(path) and read_file(path, MOST) != text.encode():
        write_atomic(path, text)


def read_starts(folder: str, whole: bool = False) -> list[dict[str, Any]]:
    """Return the starts of a run, in order; [] for a loop of your own. Raises BadInput."""
    return keep_starts(read_lines(folder, STARTS, whole))


def keep_starts(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines that are starts."""
    kinds = {"step": int, "settings": dict, "environment": dict}
    return [line for line in lines if all(isinstance(line.get(key), kinds[key]) for key in kinds)]


def write_state(folder: str, line: dict[str, Any]) -> None:
    """Append a line to state.jsonl: digest.summarize(), or the "file", "size" and "sum" of a file of weights.
    Raises OSError."""
    append_json_line(os.path.join(folder, STATES), line)


def cut_states(folder: str, step: int) -> None:
    """Delete the states after `step`, which a resumed run writes again, and the lines that a kill has cut.
    The lines of files of weights stay, as the files do. Raises OSError and BadInput."""
    kept: dict[Any, dict[str, Any]] = {}  # (place of a line of a file) or (step) -> line
    for place, line in enumerate(read_lines(folder, STATES)):
        if is_file(line):
            kept["file", place] = line
        elif is_state(line) and line["step"] <= step:
            kept.pop(line["step"], None)  # the last one of a step counts
            kept[line["step"]] = line
    cut(folder, STATES, kept.values())


def is_state(line: dict[str, Any]) -> bool:
    """Return whether a line of state.jsonl is that of a state."""
    # digests without a format, those before version 0.26, cannot be compared
    has_names = isinstance(line.get("parts"), dict) and {"digest", "format"} <= line.keys()
    return type(line.get("step")) is int and has_names


def is_file(line: dict[str, Any]) -> bool:
    """Return whether a line of state.jsonl is that of a file of weights."""
    return [type(line.get(key)) for key in ("file", "size", "sum")] == [str, int, str]
