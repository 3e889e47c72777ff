"""Read in the starts of a run (starts.py) which of them made a step, and where the run begins."""

from typing import Any


def start_of(starts: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """Return the start that made a step: the last one before it, which made later steps again. starts: at
    least one, each with a "step"."""
    chosen = starts[0]
    for start in starts[1:]:
        if start["step"] < step:
            chosen = start
    return chosen


def parent_of(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return where a run begins, if that is a step of another one: "folder", "run", "step" and "state", the
    step of the state that it has loaded. {} for another run."""
    for start in starts[:1]:
        parent = start.get("parent")
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
    text += f": steps {parent['state'] + 1}-{parent['step']} were computed again, and "
    if parent.get("unknown"):
        return text + f"it is not known that they are the same: steps {parent['unknown']} have no record"
    # a run in which they differ ends there
    if last > parent["step"]:
        return text + "are the same"
    return text + "it is not known that they are the same"
