"""Find what a restart of a loop needs: its counters, best results and best weights; and what needs a batch
after the loop over batches, because a restart at the end of an epoch has none left."""

import ast
import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from bootfile.fix.scope import list_stored
from bootfile.fix.training import Training, walk_own
from bootfile.lint.sources import FUNCTIONS, unparse
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
    # a function between the loops has names of its own
    nodes = [node for function in functions for node in ast.walk(function)]
    shared = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
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
    likely = [text for text, adds in changed.items() if text in numbers or (adds and text not in displays)]
    kept = [text for text in likely if not any(_is_reset(body, text) for body in bodies)]
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
        if used := [node for node in parts if unparse(node) == text]:
            is_set = isinstance(statement, ast.Assign | ast.AnnAssign)
            return is_set and all(isinstance(node.ctx, ast.Store) for node in used)
    return False


def find_needs(
    batches: ast.For, parents: dict[ast.AST, ast.AST], restored: Collection[str]
) -> Iterator[tuple[ast.AST, str]]:
    """Yield (a node after the loop over batches, why it fails without a batch). restored: the numbers that a
    checkpoint has."""
    function: Any = batches
    while function in parents and not isinstance(function, FUNCTIONS):
        function = parents[function]
    above = [node for node in walk_own(function.body) if getattr(node, "lineno", 0) < batches.lineno]
    given = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    inside = [*walk_own([batches])]
    unset = list_stored(inside) - list_stored(above) - given
    sums = [node for node in inside if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)]
    counts = {node.target.id for node in sums if isinstance(node.target, ast.Name)} - {*restored}
    after = "after a restart at the end of an epoch"
    for node in walk_own(_list_later(batches, parents)):
        name = getattr(node, "id", "")
        is_read = name in unset and isinstance(node.ctx, ast.Load)  # type: ignore[attr-defined]
        unset.discard(name)
        is_division = isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div)
        divisor = getattr(node, "right", getattr(node, "value", None)) if is_division else None
        if is_read:
            yield node, f"{name} is not set {after}: set it before the loop"
        elif isinstance(divisor, ast.Name) and divisor.id in counts:
            yield node, f"{divisor.id} is 0 {after}: divide by max({divisor.id}, 1)"


def _list_later(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> list[ast.stmt]:
    """Return the statements that run after a statement, up to the end of its function or of the next loop."""
    later: list[ast.stmt] = []
    while node in parents and not isinstance(node, FUNCTIONS):
        around = parents[node]
        for field in ("body", "orelse", "finalbody"):
            block: Any = getattr(around, field, None)
            if isinstance(block, list) and node in block:
                later += block[block.index(node) + 1 :]
        if isinstance(around, ast.For | ast.While):
            break
        node = around
    return later
