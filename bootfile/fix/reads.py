"""Find where a script reads the entries of a checkpoint, and by which name it has the loaded dict there."""

import ast
from typing import Any, NamedTuple

from bootfile.fix.scope import Scope
from bootfile.lint.facts import Facts
from bootfile.lint.record import Event
from bootfile.lint.sources import unparse
from bootfile.lint.values import Value, root


class Read(NamedTuple):
    """An event that reads an entry of the checkpoint. holder: the name of the loaded dict there."""

    event: Event
    key: Any
    holder: str


def list_reads(facts: Facts, dicts: list[Value]) -> list[Read]:
    """Return the reads of entries that saved dicts have, from a dict with a plain name."""
    fields: list[tuple[Event, Value]] = []
    for event in facts.loaded.values():
        if event.name == "load_state":
            fields.append((event, root(event.args.get(0, Value()))))
    for event in facts.select("read"):
        if event.order < facts.first_step:
            fields.append((event, event.value))
    reads = []
    for event, field_read in fields:
        if field_read.kind == "field" and _has(dicts, field_read.key):
            holder = _find_holder(event, field_read.key)
            if holder:
                reads.append(Read(event, field_read.key, holder))
    return reads


def is_beside(scope: Scope, read: Read, other: Read) -> bool:
    """Return whether two reads are of the same dict in the same function."""
    if read.holder != other.holder or read.event.path != other.event.path:
        return False
    functions = [scope.function(event.path, event.node) for event in (read.event, other.event)]
    return functions[0] is functions[1]


def _has(dicts: list[Value], key: Any) -> bool:
    """Return whether one of the dicts has a key."""
    return key is not None and any(key in value.parts for value in dicts)


def _find_holder(event: Event, wanted: Any) -> str:
    """Return the name of the dict from which an event reads a key; "" if it is not a plain name."""
    for node in ast.walk(event.node):
        holder, key = _split_read(node)
        is_plain = isinstance(holder, ast.Name | ast.Attribute) and "(" not in unparse(holder)
        if is_plain and isinstance(key, ast.Constant) and key.value == wanted:
            return unparse(holder)
    return ""


def _split_read(node: Any) -> tuple[Any, Any]:
    """Return (dict, key) of `checkpoint[key]` and of `checkpoint.get(key)`; (None, None) of other nodes."""
    if isinstance(node, ast.Subscript):
        return node.value, node.slice
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if is_method and node.func.attr == "get" and node.args:
        return node.func.value, node.args[0]
    return None, None
