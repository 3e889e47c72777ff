"""Damage the tensors of a checkpoint, as a restart must notice."""

import os
from typing import Any

from bootfile.exact import digest
from bootfile.prove.cases import Case

_FACTOR = 1 + 2**-6  # 1.6 % more, also in the texts


def change(state: dict[str, Any], case: Case) -> str:
    """Multiply the tensors of floating-point numbers that the case damages, in place: the largest one, or all
    of them. Return the name of the largest, "" if there is none."""
    tensors = []
    for name, value in digest.leaves(state):
        if hasattr(value, "is_floating_point") and value.is_floating_point() and value.numel():
            tensors.append((value.numel(), name, value))
    if not tensors:
        return ""
    tensors.sort(key=lambda row: row[:2])  # by size, and then by name
    _, largest_name, _ = tensors[-1]
    # first the largest alone, which most models use; if it has no effect, a second case changes all of them
    damaged = tensors[-1:]
    if case.damages == "all":
        damaged = tensors
    for _, _, tensor in damaged:
        tensor.mul_(_FACTOR)
    return largest_name


def describe(case: Case, largest: str, paths: list[str]) -> str:
    """Return what was done to checkpoints, in words. largest: the name of their largest tensor."""
    what = largest if case.damages == "largest" else "each tensor"
    return f"{what} of {', '.join(map(os.path.basename, paths))} is changed by 1.6 %"
