"""Settings of optimizers and schedules other than the main ones that were edited since the checkpoint.

The values of the checkpoint are used, because the loop may have changed them; each has a line.
"""

from typing import Any

from bootfile.exact.schedules import NAMES, may_be_scheduled, same


def compare_groups(name: str, saved: list[dict[str, Any]], here: list[dict[str, Any]]) -> list[str]:
    """Return a line for each hyperparameter of an optimizer that is not that of this run. saved, here: its
    groups."""
    if name.startswith("optimizer."):  # one inside the optimizer, whose groups it shares
        return []
    lines = []
    for number, (group_there, group_here) in enumerate(zip(saved, here, strict=True)):
        rate = "initial_lr" if "initial_lr" in group_there else "lr"
        for key in sorted(group_there.keys() & group_here.keys() - {"params", NAMES}):
            there = group_there[key]
            value = group_here[key]
            # a schedule has changed the rate of the checkpoint, but not that at the beginning
            is_setting = key == rate or not may_be_scheduled(key)
            if is_setting and not same(there, value):
                lines.append(
                    f"{key} of {name}, group {number}, is {there} in the checkpoint, which is used; this "
                    f"program has {value}"
                )
    return lines


def compare_schedules(began: dict[str, dict[str, Any]], here: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each setting of a schedule that is not that of this run. began, here: name -> its
    state before the first step."""
    lines = []
    for name, there in began.items():
        values = here.get(name, {})
        for key in sorted(there.keys() & values.keys()):
            if not same(there[key], values[key]):
                lines.append(
                    f"{key} of {name} began as {there[key]}, which is used; this program has {values[key]}"
                )
    return lines
