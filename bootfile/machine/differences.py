"""Compare what computed two runs, or two starts of a run. This module imports no torch."""

from collections.abc import Mapping
from typing import Any

from bootfile.ground.numbers import counted

Facts = dict[str, str | int]  # name -> value, of a machine (facts.py)
NONE = "none"
# names of facts
THREADS = "threads"
CPU = "CPU"
OPERATORS = "operators"
# Those that decide about the instructions of a sum. Another one of them is another instruction set.
INSTRUCTIONS = ("ATen", "oneDNN", "MKL", OPERATORS)


def find_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, value of the first, value of the second) of all facts that differ, the most important
    first. A fact that only one of them has is not compared: it may be of another version of Bootfile."""
    names = [name for name in first if name in second]
    return [(name, first[name], second[name]) for name in names if first[name] != second[name]]


def other_instructions(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first difference of the instruction sets; None if they are equal."""
    return next((each for each in find_differences(first, second) if each[0] in INSTRUCTIONS), None)


def in_words(name: str, value: Any) -> str:
    """Return a fact as a part of a sentence: "2 threads", "ATen AVX2"."""
    if name == THREADS:
        return counted(value, "thread")
    texts = {CPU: "the CPU", OPERATORS: "operators whose probe has the digest"}
    return f"{texts.get(name, name)} {value}"


def without_step(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a machine without its first step."""
    return {name: value for name, value in machine.items() if name != "step"}
