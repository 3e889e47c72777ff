"""Find what needs a batch after the loop over batches: a restart at the end of an epoch has none left."""

import ast
from collections.abc import Collection, Iterator
from typing import Any

from bootfile.fix.training import walk_own
from bootfile.lint.sources import FUNCTIONS


def find_needs(
    batches: ast.For, parents: dict[ast.AST, ast.AST], restored: Collection[str]
) -> Iterator[tuple[ast.AST, str]]:
    """Yield (a node after the loop over batches, why it fails without a batch). restored: the numbers that a
    checkpoint has."""
    after = _list_later(batches, parents)
    inside = [*walk_own([batches])]
    earlier = _find_set_before(batches, parents)
    unset = _find_stored(inside) - earlier
    added = [
        node.target for node in inside if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)
    ]
    counts = {target.id for target in added if isinstance(target, ast.Name)} - {*restored}
    for node in walk_own(after):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            unset.discard(node.id)
        elif isinstance(node, ast.Name) and node.id in unset:
            unset.discard(node.id)
            yield node, f"{node.id} is not set after a restart at the end of an epoch: set it before the loop"
        elif _find_divisor(node) in counts:
            count = _find_divisor(node)
            yield node, f"{count} is 0 after a restart at the end of an epoch: divide by max({count}, 1)"


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


def _find_set_before(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> set[str]:
    """Return the names that the function of a loop, or the module, has above the loop."""
    line = getattr(node, "lineno", 0)
    while node in parents and not isinstance(node, FUNCTIONS):
        node = parents[node]
    names = {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
    body = getattr(node, "body", [])
    above = [part for part in walk_own(body) if getattr(part, "lineno", line) < line]
    imports = {
        (alias.asname or alias.name).partition(".")[0]
        for part in above
        if isinstance(part, ast.Import | ast.ImportFrom)
        for alias in part.names
    }
    defined = {part.name for part in above if isinstance(part, (*FUNCTIONS, ast.ClassDef))}
    return names | imports | defined | _find_stored(above)


def _find_stored(nodes: list[ast.AST]) -> set[str]:
    stored = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return {node.id for node in stored}


def _find_divisor(node: ast.AST) -> str:
    """Return the name by which a node divides; "" if there is none."""
    divisor: ast.AST | None = None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        divisor = node.right
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        divisor = node.value
    return divisor.id if isinstance(divisor, ast.Name) else ""
