"""The file with a sum of the gradients of each shard in each step, of a job with exact shards and --recheck.

    FOLDER/shards.jsonl    {"step": 44, "shards": [81985529216486, ...]}    one number for each shard

The sum is one of the bits (common/parallel/gradient_sums.py). An audit compares it, and names the shards that
differ.
"""

import json
import os
from collections.abc import Mapping, Sequence

from bootfile.ground.files import append_lines, explained, read_file, read_json_lines, write_atomic

FILE = "shards.jsonl"  # in a run's output folder
_MOST = 2**30  # bytes of FILE


def write(folder: str, sums: Mapping[int, Sequence[int]]) -> None:
    """Append steps to FILE. sums: of the shards of each step. Raises OSError."""
    append_lines(os.path.join(folder, FILE), _format(sums))


def read(folder: str) -> dict[int, list[int]]:
    """Return the sums of the shards by step, the last ones of each step; {} without FILE. Raises BadInput."""
    path = os.path.join(folder, FILE)
    with explained(f"{path} cannot be read"):
        lines = read_json_lines(path, _MOST)
    by_step = {}
    for line in lines:
        shards = line.get("shards")
        if type(line.get("step")) is int and isinstance(shards, list):
            by_step[line["step"]] = shards
    return dict(sorted(by_step.items()))


def cut(folder: str, step: int) -> None:
    """Delete the lines after `step`, which a resumed run computes again, and those that a kill has cut.
    Raises OSError and BadInput."""
    path = os.path.join(folder, FILE)
    kept = {number: shards for number, shards in read(folder).items() if number <= step}
    # most starts have nothing to cut: then the file is not written again
    if os.path.exists(path) and read_file(path, _MOST) != _format(kept).encode():
        write_atomic(path, _format(kept))


def _format(sums: Mapping[int, Sequence[int]]) -> str:
    lines = []
    for step, shards in sums.items():
        lines.append(json.dumps({"step": step, "shards": list(shards)}) + "\n")
    return "".join(lines)
