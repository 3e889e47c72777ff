"""Ask whether a checkpoint is the state that its run has recorded.

FOLDER/state.jsonl has, for each state that was saved, the name of the run and the digest of the state. A
restart, --from, audit, replay and --evaluate ask here before they use FOLDER/checkpoints/step_N.pt. A step
without a line, as in a folder that has only checkpoints, is not compared, and neither is one of a record that
cannot be read: no run ends with that.

The same file has a line for each file of weights that was written: its size and the sum of its bytes.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from bootfile.exact import checked_files, digest, files, kinds
from bootfile.ground.errors import BadInput, print_line
from bootfile.ground.results import CHECKPOINTS
from bootfile.histories import read_states, read_weights
from bootfile.records import STATES

_Lines = Mapping[int, Mapping[str, Any]]  # step -> line of state.jsonl


def verify(path: str) -> dict[str, Any]:
    """Read a checkpoint, compare it with the record of its run, and return its facts. Raises Refused."""
    facts = checked_files.facts_of(path)
    check(path, checked_files.read(path, whole=False))
    return facts


def check(path: str, state: Mapping[str, Any]) -> None:
    """Raise Refused if a state is not the one that the run in its folder has recorded at its step. state: of
    checked_files.read(path); with tensors in files of their own only the name of the run is compared."""
    lines = _read_record(path)
    step = state.get("step")
    if not lines or not isinstance(step, int):
        return
    if reason := _find_other_run(path, state.get("run"), step, lines):
        raise files.Refused(reason)
    if step in lines and "shards" not in state:
        _compare(step, lines[step], digest.summarize(step, state["objects"]))


def _find_other_run(path: str, run: object, step: int, lines: _Lines) -> str:
    """Return why a checkpoint is one of another run than the record of its folder; "" if it is not."""
    # a state without a line: the run of the next line has continued from it, or it is newer than all lines
    later = [known for known in lines if known >= step]
    nearest = min(later, default=max(lines, default=0))
    owner = str(lines.get(nearest, {}).get("run", ""))  # before version 0.50 no line names it
    if not owner or owner == run:
        return ""
    return (
        f"it is a state of another run, {run}: {STATES} has run {owner} at step {step}. To begin with it "
        f"on purpose: --from FOLDER_OF_ITS_RUN, or --weights {path}"
    )


def find_foreign(folder: str) -> str:
    """Return which kept checkpoint of a run is one of another run, in words, or "", from the .json files."""
    lines = _read_or_warn(read_states, folder)
    for path in files.list_newest_first(os.path.join(folder, CHECKPOINTS)):
        step = files.step_of(path)
        if step > max(lines, default=0):  # another run has left it there, and this one did not continue it
            continue
        with contextlib.suppress(files.Refused):  # it is damaged: a restart names it
            if reason := _find_other_run(path, checked_files.facts_of(path).get("run"), step, lines):
                return f"{path}: {reason}"
    return ""


def check_sharded(path: str, state: Mapping[str, Any], is_first: bool) -> str:
    """Return why the state of a sharded model is not the recorded one, or "". Call it on every rank: each
    sums its parts; only the answer of the rank with is_first counts."""
    step = state["step"]
    line = digest.summarize(step, state["objects"])
    try:
        if is_first:
            _compare(step, _read_record(path).get(step, {}), line)
    except files.Refused as reason:
        return str(reason)
    return ""


def find_changed(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts in which two lines of state.jsonl differ: causes before effects."""
    names = sorted(first["parts"].keys() | second["parts"].keys())
    names = [name for name in names if first["parts"].get(name) != second["parts"].get(name)]
    return sorted(names, key=kinds.find_kind)  # a learning rate is a cause, and the weights are its effects


def describe_change(known: Mapping[str, Any], line: Mapping[str, Any]) -> str:
    """Return which parts of two lines of state.jsonl differ, in words; "" if none, or if they cannot be
    compared."""
    if known.get("format") != line["format"] or known["digest"] == line["digest"]:
        return ""
    # the digest has decided; the parts only tell where, and it may name none
    names = find_changed(known, line) or ["a part"]
    more = f" and {len(names) - 1} more parts" if len(names) > 1 else ""
    return f"{names[0]}{more}, digest {line['digest'][:8]} for {known['digest'][:8]}"


def check_weights(path: str) -> None:
    """Raise Refused if a file of weights, such as best.pth, has a record in its folder, and another sum."""
    folder, name = os.path.split(os.path.abspath(path))
    for _ in range(2):  # a run that still trains records a file before it replaces it
        present = checked_files.sum_file(path)
        known = _read_or_warn(read_weights, folder).get(name)
        if not known or present in known or checked_files.sum_file(path, is_former=True) in known:
            return
    raise files.Refused(
        f"{STATES} has another sum of its bytes: it was altered or replaced after the run wrote it. To use "
        "it on purpose, copy it to another folder"
    )


def _read_record(path: str) -> dict[int, dict[str, Any]]:
    """Return the lines of state.jsonl of the run that has a checkpoint, {} for a file outside of a run."""
    folder, name = os.path.split(os.path.dirname(os.path.abspath(path)))
    return _read_or_warn(read_states, folder) if name == CHECKPOINTS else {}


def _read_or_warn(read: Callable[[str], dict[Any, Any]], folder: str) -> dict[Any, Any]:
    """Return the content of a record; {} with a warning if it cannot be read."""
    try:
        return read(folder)
    except BadInput as error:
        print_line(f"warning: nothing is compared with it: {error}")
        return {}


def _compare(step: int, known: Mapping[str, Any], line: Mapping[str, Any]) -> None:
    # before version 0.50 a rank that saved alone, never at a planned step, recorded another sum
    is_certain = "run" in known or known.get("planned", True)
    changed = describe_change(known, line) if is_certain else ""
    if changed:
        raise files.Refused(
            f"the state of step {step} is not the one that the run recorded when it saved it ({changed}): "
            f"the file was altered since, or {STATES} was"
        )
