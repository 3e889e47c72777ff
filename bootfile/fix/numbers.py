"""Find the numbers of a training loop that a restart needs: counters, best results, and best weights."""

import ast
import re
from typing import Any, NamedTuple

from bootfile.fix.training import Training, walk_own
from bootfile.lint.sources import unparse
from bootfile.lint.values import root

_NUMBER = re.compile(r"-?(\d\S*|True|False|None|\w+\.(inf|Inf|nan)|float\(.*\)|copy\.deepcopy\(.*\))")
_DISPLAYS = (ast.List, ast.Dict, ast.ListComp, ast.Set)


class Numbers(NamedTuple):
    """Names and attributes. of_epochs: those that only the function of the loop over epochs has."""

    of_epochs: list[str]
    of_all: list[str]


def find_numbers(training: Training, holder: str) -> Numbers:
    """Return what begins with a number before the loop over epochs, and keeps its value from one epoch to the
    next. holder: "self." if the loops are those of one object."""
    functions = [function for function, _ in training.calls]
    bodies = [training.epochs.body, *[function.body for function in functions]]
    nodes = [node for function in functions for node in ast.walk(function)]
    # a function between the loops has names of its own
    shared: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Global | ast.Nonlocal):
            shared.update(node.names)
    if holder:
        shared |= {f"self.{name}" for name in root(training.outer.names["self"]).parts}
    changed: dict[str, bool] = {}  # name -> whether the loop adds to it
    for body in bodies:
        known = shared | training.outer.local if body is training.epochs.body else shared
        for node in walk_own(body):
            for text, _ in _list_set(node):
                if text in known:
                    changed[text] = changed.get(text, False) or isinstance(node, ast.AugAssign)
    inside = {*ast.walk(training.epochs)}
    first = [pair for node in ast.walk(training.tree) if node not in inside for pair in _list_set(node)]
    numbers = {text for text, value in first if _NUMBER.fullmatch(unparse(value))}
    displays = {text for text, value in first if isinstance(value, _DISPLAYS)}
    kept = []
    for text, adds in changed.items():
        is_number = text in numbers or (adds and text not in displays)
        if is_number and not any(_is_reset(body, text) for body in bodies):
            kept.append(text)
    of_epochs = [text for text in kept if functions and text not in shared]
    return Numbers(of_epochs, [text for text in kept if text not in of_epochs])


def _list_set(node: Any) -> list[tuple[str, ast.expr]]:
    """Return the names and attributes that a statement sets, each with its value."""
    if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) or node.value is None:
        return []
    pairs: list[Any] = []
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        is_apart = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        values = node.value.elts if is_apart else [node.value] * len(targets)  # type: ignore[attr-defined]
        pairs += zip(targets, values, strict=False)
    return [(unparse(target), value) for target, value in pairs]


def _is_reset(body: list[ast.stmt], text: str) -> bool:
    """Return whether each run of a body sets a number before it reads it."""
    for statement in body:
        parts = [node for node in ast.walk(statement) if isinstance(node, ast.Name | ast.Attribute)]
        used = [node for node in parts if unparse(node) == text]
        if used:
            is_set = isinstance(statement, ast.Assign | ast.AnnAssign)
            return is_set and all(isinstance(node.ctx, ast.Store) for node in used)
    return False
