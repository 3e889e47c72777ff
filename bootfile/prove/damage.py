"""Damage the tensors of a checkpoint, as a restart must notice."""

import os
from typing import Any

from bootfile.exact import digest
from bootfile.prove.cases import Case


def change(state: dict[str, Any], case: Case) -> str:
    """Change the tensors of floating-point numbers in a state by 1.6 %, as a restart must notice: those that
    the case damages. Return the name of the largest, or ""."""
    numbers = [
        (each.numel(), name, each)
        for name, each in digest.leaves(state)
        if hasattr(each, "is_floating_point") and each.is_floating_point() and each.numel()
    ]
    if not numbers:
        return ""
    *others, (_, name, largest) = sorted(numbers, key=lambda each: each[:2])
    for each in [largest, *(each for *_, each in others if case.damages == "all")]:
        each.mul_(1 + 2**-6)
    return name


def describe(case: Case, largest: str, paths: list[str]) -> str:
    """Return what was done to checkpoints, in words. largest: the name of their largest tensor."""
    what = largest if case.damages == "largest" else "each tensor"
    return f"{what} of {', '.join(map(os.path.basename, paths))} is changed by 1.6 %"
