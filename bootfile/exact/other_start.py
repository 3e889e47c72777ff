"""What differs between the start that wrote a checkpoint and the present one: the order of what an optimizer
keeps by position, the code, and the machine. Only a restart loads this module.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from bootfile.exact.files import Refused
from bootfile.exact.machines import REMEDY, Machines
from bootfile.exact.program import Order
from bootfile.ground.errors import BadInput
from bootfile.machine import differences, facts
from bootfile.machine.differences import THREADS, in_words
from bootfile.machine.levels import OPTION, VARIABLES, level_in_use

# These change from machine to machine in a fleet whose instructions are the same.
_MAY_DIFFER = (THREADS, differences.CPU)


def check_order(saved: Order, present: Order) -> None:
    """Raise Refused, with the first names that differ, if a checkpoint has another order than this run.
    Groups and generators that only one of them has are not compared: the loop may add them later."""
    # zip() ends with the shorter list
    for old_name, name in zip(saved["generators"], present["generators"], strict=False):
        if old_name != name:
            raise Refused(
                f"its generators were added in the order {', '.join(saved['generators'])}, this run's in the "
                f"order {', '.join(present['generators'])}: each gets a seed by its place"
            )
    saved_groups = saved["groups"] | saved["held"]
    for owner, groups in (present["groups"] | present["held"]).items():
        if owner in saved_groups:
            _compare(owner, saved_groups[owner], groups)
    _compare("model", [saved["parameters"]], [present["parameters"]])


def _compare(owner: str, saved: list[list[str]], present: list[list[str]]) -> None:
    """Raise Refused if a group that both lists have has other names."""
    for number, (old_names, names) in enumerate(zip(saved, present, strict=False)):
        for old_name, name in itertools.zip_longest(old_names, names, fillvalue="nothing"):
            if old_name != name:
                raise Refused(
                    f"its {owner} has {old_name or 'a tensor'} where this run has {name or 'a tensor'} "
                    f"(group {number}), and keeps tensors by position: restore the order of that run, or "
                    "start a new run from its weights"
                )


def describe_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return in words which modules have another digest than before; "" if none has. A module that only one
    of the starts has imported is not compared."""
    changed = [name for name, digest in now.items() if before.get(name, digest) != digest]
    shown = ", ".join(changed)
    if len(changed) > 3:
        shown = f"{', '.join(changed[:2])} and {len(changed) - 2} more modules"
    return f"{shown} {'has' if len(changed) == 1 else 'have'} changed" if changed else ""


def compare_machines(machines: Machines, state: Mapping[str, Any]) -> bool:
    """Name what differs from the machine before, and return whether its instruction set does. Call it on
    rank 0, before a checkpoint is compared with the run: generated data may differ by the same cause.
    Raises BadInput if the instruction set has to be the same."""
    saved = state["machines"]
    step = state["step"]
    if not saved:
        return False
    # the machine of the last start; earlier ones were compared at its restart
    before = saved[-1]
    now = facts.describe()
    difference = differences.other_instructions(before, now)
    if difference and machines.same_instructions and not _is_new_level(before):
        name, there, here = difference
        raise BadInput(
            f"this run computed with {in_words(name, there)} until step {step}, and this machine "
            f"computes with {in_words(name, here)}: the bits would differ. Continue on the same kind "
            f"of CPU, or accept it from here on: {OPTION} native (same_instructions=False in a loop of "
            f"your own). {REMEDY}"
        )
    # other facts only bring a warning: whether they change the bits of this run is not known
    changes = [row for row in differences.find_differences(before, now) if row[0] not in _MAY_DIFFER]
    if not changes:
        return False
    name, there, here = changes[0]
    more = f" ({len(changes) - 1} more facts differ)" if len(changes) > 1 else ""
    machines.say(
        f"warning: this run computed with {in_words(name, there)} until step {step}, and this machine "
        f"computes with {in_words(name, here)}{more}: its bits may differ from here on"
    )
    return difference is not None


def _is_new_level(before: dict[str, Any]) -> bool:
    """Return whether the user has chosen a level of instructions that the machine before did not use."""
    level = level_in_use()
    if level is None:
        return False
    variables = VARIABLES[level]
    had_level = before.get("MKL") == variables["MKL_CBWR"]
    return not had_level or str(before.get("ATen")).lower() != variables["ATEN_CPU_CAPABILITY"]
