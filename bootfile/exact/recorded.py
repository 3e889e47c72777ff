"""Ask whether a checkpoint is the state that its run has recorded.

FOLDER/state.jsonl has, for each state that was saved, the name of the run and the digest of the state. A
restart, --from, audit, replay and --evaluate ask here before they use FOLDER/checkpoints/step_N.pt. A step
without a line, as in a folder that has only checkpoints, is not compared.

The same file has a line for each file of weights that was written: its size and the sum of its bytes.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from bootfile.exact import digest, digest_lines, files, kinds
from bootfile.ground.errors import BadInput, print_line
from bootfile.ground.results import CHECKPOINTS

_Lines = Mapping[int, Mapping[str, Any]]  # step -> line of state.jsonl


def verify(path: str) -> dict[str, Any]:
    """Read a checkpoint, compare it with the record of its run, and return the facts of its .json. Raises
    Refused with the reason."""
    facts = files.facts_of(path)
    check(path, files.read(path, whole=False))
    return facts


def check(path: str, state: Mapping[str, Any]) -> None:
    """Raise Refused if a state is not the one that the run in its folder has recorded at its step.

    state: of files.read(path). If its tensors are in files of their own (whole=False), which have checksums,
    only the name of the run is compared; see check_sharded().
    """
    lines = _read_record(path)
    step = state.get("step")
    if not lines or not isinstance(step, int):
        return
    check_run(path, {"run": state.get("run"), "step": step}, lines)
    if step in lines and "shards" not in state:
        _compare(step, lines[step], digest.summarize(step, state["objects"]))


def check_run(path: str, facts: Mapping[str, Any], lines: _Lines | None = None) -> None:
    """Raise Refused if a checkpoint is one of another run than the record of its folder. facts: "run" and
    "step". lines: of digest_lines.read(), if they were read before."""
    step = facts.get("step", 0)
    if lines is None:
        lines = _read_record(path)
    owner = _find_owner(lines, step)
    if owner and owner != facts.get("run"):
        raise files.Refused(
            f"it is a state of another run, {facts.get('run')}: {digest_lines.FILE} has run {owner} at step "
            f"{step}. To begin with it on purpose: --from FOLDER_OF_ITS_RUN, or --weights {path}"
        )


def find_foreign(folder: str) -> str:
    """Return which kept checkpoint of a run is one of another run, in words; "" if none is. Only the .json
    files are read."""
    lines = _read_or_warn(digest_lines.read, folder)
    for path in files.list_newest_first(os.path.join(folder, CHECKPOINTS)):
        step = files.step_of(path)
        if step > max(lines, default=0):  # another run has left it there, and this one did not continue it
            continue
        try:
            facts = files.facts_of(path)
        except files.Refused:  # it is damaged: a restart names it
            continue
        try:
            check_run(path, {"run": facts.get("run"), "step": step}, lines)
        except files.Refused as reason:
            return f"{path}: {reason}"
    return ""


def check_sharded(path: str, state: Mapping[str, Any], is_first: bool) -> str:
    """Return why the state of a sharded model is not the one that the run recorded; "" if it is. Call it on
    every rank: each one sums its parts. Only the answer of the rank with is_first counts."""
    step = state["step"]
    line = digest.summarize(step, state["objects"])
    if not is_first:
        return ""
    try:
        _compare(step, _read_record(path).get(step, {}), line)
    except files.Refused as reason:
        return str(reason)
    return ""


def describe_change(known: Mapping[str, Any], line: Mapping[str, Any]) -> str:
    """Return which parts of a state differ from those of a recorded one, in words; "" if none does, or if the
    digests cannot be compared. known, line: lines of state.jsonl."""
    if known.get("format") != line["format"] or known["digest"] == line["digest"]:
        return ""
    # the digest has decided; the parts only tell where
    names = []
    for name in line["parts"].keys() | known["parts"].keys():
        if known["parts"].get(name) != line["parts"].get(name):
            names.append(name)
    names.sort()
    names.sort(key=kinds.find_kind)  # a learning rate is a cause, and the weights are its effects
    first = "a part"  # a digest may name no parts
    if names:
        first = names[0]
    more = f" and {len(names) - 1} more parts" if len(names) > 1 else ""
    return f"{first}{more}, digest {line['digest'][:8]} for {known['digest'][:8]}"


def check_weights(path: str) -> None:
    """Raise Refused if a file of weights, such as best.pth, is not one that the run in its folder has
    recorded. A file without a record is not compared."""
    folder, name = os.path.split(os.path.abspath(path))
    for is_last in (False, True):
        present = files.sum_file(path)  # first: a run that still trains records a file before it replaces it
        known = _read_or_warn(digest_lines.read_files, folder).get(name)
        if not known or present in known or files.sum_file(path, is_former=True) in known:
            return
        if is_last:
            raise files.Refused(
                f"{digest_lines.FILE} has another sum of its bytes: it was altered or replaced after the run "
                "wrote it. To use it on purpose, copy it to another folder"
            )


def _read_record(path: str) -> dict[int, dict[str, Any]]:
    """Return the lines of state.jsonl of the run that has a checkpoint, {} for a file outside of a run."""
    folder, name = os.path.split(os.path.dirname(os.path.abspath(path)))
    return _read_or_warn(digest_lines.read, folder) if name == CHECKPOINTS else {}


def _read_or_warn(read: Callable[[str], dict[Any, Any]], folder: str) -> dict[Any, Any]:
    """Return the content of a record; {} with a warning if it cannot be read: no run ends with that."""
    try:
        return read(folder)
    except BadInput as error:
        print_line(f"warning: nothing is compared with it: {error}")
        return {}


def _find_owner(lines: _Lines, step: int) -> str:
    """Return the name of the run that has made a step; "" if no line names it, as before version 0.50."""
    if step in lines:
        return str(lines[step].get("run", ""))
    # a state without a line: the run of the next line has continued from it, or it is newer than all lines
    nearest = min((known for known in lines if known > step), default=max(lines, default=0))
    return str(lines.get(nearest, {}).get("run", ""))


def _compare(step: int, known: Mapping[str, Any], line: Mapping[str, Any]) -> None:
    # before version 0.50 a rank that saved alone, never at a planned step, recorded another sum
    is_certain = "run" in known or known.get("planned", True)
    if not is_certain:
        return
    changed = describe_change(known, line)
    if changed:
        raise files.Refused(
            f"the state of step {step} is not the one that the run recorded when it saved it ({changed}): "
            f"the file was altered since, or {digest_lines.FILE} was"
        )
