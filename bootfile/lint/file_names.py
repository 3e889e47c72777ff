"""The names of the files that a script writes and reads, as far as constants and defaults of options tell
them: `os.path.join("out", f"epoch_{epoch}.pt")` is out/epoch_*.pt."""

import ast
import os
import re
from typing import Any

from bootfile.lint.options import Option
from bootfile.lint.values import Value, root

OUT = "OUT"  # for an option without a default that names a folder
_IS_FOLDER = re.compile(r"out|dir|folder|path|save|log|ckpt|checkpoint|exp", re.IGNORECASE)
_SAME = ("abspath", "realpath", "normpath", "expanduser", "fspath", "open", "resolve", "absolute", "as_posix")
_FIELD = re.compile(r"\{[^{}]*\}|%[-0-9.]*[a-z]")


class Names:
    """Renders paths. options: those of the script. given: the options without a default that are folders, and
    the folder that is to be given for each."""

    def __init__(self, options: dict[str, Option]):
        self.options = options
        self.given: dict[str, str] = {}

    def find(self, value: Value, depth: int = 0) -> str:
        """Return a path with `*` for each part that is not known."""
        text = self._render(root(value), depth)
        text = re.sub(r"\*+", "*", text)
        return os.path.normpath(text) if text and not depth else text

    def option_of(self, value: Value) -> Option | None:
        """Return the option whose value this is."""
        is_read = value.kind in ("option", "attribute", "unknown") or "by_name" in value.flags
        is_read = is_read and "from_call" not in value.flags
        return self.options.get(value.label) if is_read else None

    def _render(self, value: Value, depth: int) -> str:
        if depth > 12:
            return "*"
        if value.kind == "const" or (value.kind == "option" and value.key is not None):
            return str(value.key)
        option = self.option_of(value)
        if option is not None:
            return self._render_option(option)
        # `sys.argv[1]`
        if value.of is not None and value.of.label == "sys.argv":
            return self._give("") if value.key == 1 else "*"
        parts = [self.find(part, depth + 1) for part in value.options.values()]
        if isinstance(value.node, ast.JoinedStr):
            return self._join_text(value.node, parts)
        if isinstance(value.node, ast.BinOp) and len(parts) == 2:
            return self._combine(value.node.op, root(value.options[1]), *parts)
        if value.kind in ("attribute", "option") and value.of is not None:
            return _read_field(root(value.of), value.label)
        name = str(value.key or "").rpartition(".")[2]
        if not parts:
            return "*"
        if value.kind == "text":  # `str(path)`
            return parts[0]
        if name == "format":
            return _fill(parts[0], parts[1:])
        if name in ("join", "joinpath", "Path", "PurePath"):
            return os.path.join(*parts)
        return os.path.dirname(parts[0]) if name == "dirname" else parts[0] if name in _SAME else "*"

    def _render_option(self, option: Option) -> str:
        if isinstance(option.default, str) and option.default:
            return option.default
        is_folder = option.has_value and option.default is None and _IS_FOLDER.search(option.name)
        return self._give(option.flag if option.flag.startswith("-") else "") if is_folder else "*"

    def _give(self, flag: str) -> str:
        self.given[flag] = OUT
        return OUT

    def _combine(self, operator: ast.operator, right: Value, first: str, second: str) -> str:
        if isinstance(operator, ast.Div):
            return os.path.join(first, second)
        if isinstance(operator, ast.Add):
            return first + second
        if not isinstance(operator, ast.Mod):
            return "*"
        given = right.parts.values() if right.kind == "list" else (right,)
        return _fill(first, [self.find(part, 1) for part in given])

    def _join_text(self, node: ast.JoinedStr, parts: list[str]) -> str:
        rest = iter(parts)
        texts = []
        for part in node.values:
            if isinstance(part, ast.Constant):
                texts.append(str(part.value))
                continue
            inner = next(rest, "*")
            texts.append("*" if getattr(part, "format_spec", None) is not None else inner)
        return "".join(texts)


def _fill(text: str, parts: list[str]) -> str:
    """Return a text with its fields replaced in their order, or by * if they have numbers or names."""
    rest = iter(parts)
    is_ordered = all(field[1] in ":}" or field[0] == "%" for field in _FIELD.findall(text))

    def fill(field: re.Match[str]) -> str:
        part = next(rest, "*") if is_ordered else "*"
        return part if field[0] in ("{}", "%s", "%d") else "*"

    return _FIELD.sub(fill, text)


def _read_field(owner: Value, name: str) -> str:
    """Return the default of a field of a class of the project."""
    body: list[Any] = getattr(getattr(owner.cls, "node", None), "body", [])
    for part in body:
        is_field = isinstance(part, ast.AnnAssign) and getattr(part.target, "id", "") == name
        if is_field and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str):
            return part.value.value
    return "*"
