"""What the lines of a run that has begun say: its starts, its parent, its states, weights and shards.

The programs that look at runs read it here, and a restart. The first start of a run does not load it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from bootfile.ground.files import append_lines, parse_json_lines, read_file, write_atomic
from bootfile.records import METRICS, MOST, SHARDS, STATES, cut, is_file, is_state, read_lines


def start_of(starts: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """Return the start that made a step: the last one before it, which made later steps again."""
    earlier = [start for start in starts[1:] if start["step"] < step]
    return earlier[-1] if earlier else starts[0]


def world_size_of(start: Mapping[str, Any]) -> int:
    """Return the number of processes of a start; 1 if it is not known."""
    size = start["environment"].get("world size", 1)
    return size if isinstance(size, int) else 1


def parent_of(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return where a run begins, if that is a step of another one: "folder", "run", "step" and "state", the
    step of the state that it has loaded. {} for another run."""
    parent = starts[0].get("parent") if starts else None
    if isinstance(parent, dict) and all(type(parent.get(name)) is int for name in ("step", "state")):
        return parent
    return {}


def describe_parent(parent: dict[str, Any], last: float) -> str:
    """Return a result of parent_of() in words, "" for {}. last: the last step that the run has recorded
    or reported."""
    if not parent:
        return ""
    text = f"begins at step {parent['step']} of {parent.get('folder')}"
    if parent["state"] == parent["step"]:
        return text
    unknown = f": steps {parent['unknown']} have no record" if parent.get("unknown") else ""
    # a run in which they differ ends there
    is_known = last > parent["step"] and not unknown
    verdict = "are the same" if is_known else f"it is not known that they are the same{unknown}"
    return f"{text}: steps {parent['state'] + 1}-{parent['step']} were computed again, and {verdict}"


def read_states(folder: str, whole: bool = False) -> dict[int, dict[str, Any]]:
    """Return the recorded states by step, the last one of each step. Raises BadInput."""
    by_step = {}
    for line in filter(is_state, read_lines(folder, STATES, whole)):
        by_step[line["step"]] = line | {"digest": str(line["digest"])}
    return dict(sorted(by_step.items()))


def read_weights(folder: str) -> dict[str, list[tuple[int, str]]]:
    """Return (size in bytes, sum) of each version of the files of weights, by name. Raises BadInput."""
    versions: dict[str, list[tuple[int, str]]] = {}
    for line in filter(is_file, read_lines(folder, STATES)):
        versions.setdefault(line["file"], []).append((line["size"], line["sum"]))
    return versions


def write_shards(folder: str, sums: Mapping[int, Sequence[int]]) -> None:
    """Append the sums of the shards of some steps to shards.jsonl. Raises OSError."""
    text = "".join(json.dumps(line) + "\n" for line in _format_shards(sums))
    append_lines(os.path.join(folder, SHARDS), text)


def read_shards(folder: str) -> dict[int, list[int]]:
    """Return the sums of the shards by step, the last ones of each step. Raises BadInput."""
    by_step = {}
    for line in read_lines(folder, SHARDS):
        if type(line.get("step")) is int and isinstance(line.get("shards"), list):
            by_step[line["step"]] = line["shards"]
    return dict(sorted(by_step.items()))


def cut_shards(folder: str, step: int) -> None:
    """Delete the steps after `step`, which a resumed run computes again, and the lines that a kill has cut.
    Raises OSError and BadInput."""
    sums = read_shards(folder)
    cut(folder, SHARDS, _format_shards({number: sums[number] for number in sums if number <= step}))


def _format_shards(sums: Mapping[int, Sequence[int]]) -> list[dict[str, Any]]:
    return [{"step": step, "shards": list(shards)} for step, shards in sums.items()]


def cut_reports(folder: str, step: int, repeats: bool) -> dict[str, float] | None:
    """Delete from metrics.jsonl the reports after `step`, the evaluation at `step` (the checkpoint is older),
    unfinished lines, and if it `repeats` also the report at `step`. Return the step and time of the last
    report after `step`, or None. Raises OSError."""
    path = os.path.join(folder, METRICS)
    if not os.path.exists(path):
        return None
    kept = []
    last = None
    for text in read_file(path, MOST).decode(errors="replace").split("\n"):
        for line in parse_json_lines(text.encode()):  # none of an unfinished line
            at = line.get("step")
            is_kept = at == step and "loss" in line and not repeats
            if is_kept or (type(at) is int and at < step):
                kept.append(f"{text}\n")
            elif type(at) is int and at > step and "time" in line:
                last = {"step": at, "time": line["time"]}
    # in one step: a kill must not leave a part of the earlier reports
    write_atomic(path, "".join(kept))
    return last
