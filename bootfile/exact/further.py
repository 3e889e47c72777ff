"""Settings of optimizers and schedules other than the main ones that were edited since the checkpoint.

The values of the checkpoint are used, because the loop may have changed them; each has a line.
"""

from typing import Any

from bootfile.exact.schedules import NAMES, may_be_scheduled, same


def compare_groups(name: str, saved: list[dict[str, Any]], present: list[dict[str, Any]]) -> list[str]:
    """Return a line for each hyperparameter of an optimizer that differs from the checkpoint. saved, present:
    the parameter groups of the checkpoint and of this program."""
    if name.startswith("optimizer."):  # one inside the optimizer, whose groups it shares
        return []
    lines = []
    for number, (saved_group, group) in enumerate(zip(saved, present, strict=True)):
        rate = "initial_lr" if "initial_lr" in saved_group else "lr"
        for key in sorted(saved_group.keys() & group.keys() - {"params", NAMES}):
            # a schedule has changed the rate of the checkpoint, but not its initial rate
            is_setting = key == rate or not may_be_scheduled(key)
            if is_setting and not same(saved_group[key], group[key]):
                lines.append(
                    f"{key} of {name}, group {number}, is {saved_group[key]} in the checkpoint, which is "
                    f"used; this program has {group[key]}"
                )
    return lines


def compare_schedules(saved: dict[str, dict[str, Any]], present: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each setting of a schedule that differs from the checkpoint. saved, present: name ->
    state of the schedule before its first step."""
    lines = []
    for name, began in saved.items():
        begins = present.get(name, {})
        for key in sorted(began.keys() & begins.keys()):
            if not same(began[key], begins[key]):
                lines.append(
                    f"{key} of {name} began as {began[key]}, which is used; this program has {begins[key]}"
                )
    return lines
