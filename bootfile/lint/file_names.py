"""The names of the files that a script writes and reads, as far as constants and the defaults of its options
tell them: `os.path.join("out", f"epoch_{epoch}.pt")` is out/epoch_*.pt.

Options are those of argparse. Of others, such as those of click or of the fields of a dataclass, nothing is
known: what depends on them is a word in capitals (advice.py).
"""

import ast
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from bootfile.lint.sources import Source, unparse
from bootfile.lint.values import Value, root

OUT = "OUT"  # for an option without a default that names a folder
UNKNOWN = object()  # a default that is not constant
_IS_FOLDER = re.compile(r"out|dir|folder|path|save|log|ckpt|checkpoint|exp", re.IGNORECASE)
_SAME = ("abspath", "realpath", "normpath", "expanduser", "fspath", "open", "resolve", "absolute", "as_posix")
_FIELD = re.compile(r"\{[^{}]*\}|%[-0-9.]*[a-z]")
_NO_VALUE = ("store_true", "store_false", "count", "argparse.BooleanOptionalAction", "BooleanOptionalAction")


class Option(NamedTuple):
    """One option. flag: "--resume"; the name of an argument by place. default: None without one, UNKNOWN if
    it is not constant. has_value: it is followed by a value. is_required: the script refuses to start without
    it."""

    flag: str
    name: str
    default: Any
    has_value: bool
    is_required: bool


def find_options(sources: list[Source]) -> dict[str, Option]:
    """Return the options of a script and the modules of its project, by the name of their value."""
    options: dict[str, Option] = {}
    for call in [node for source in sources for node in source.find(ast.Call)]:
        for option in _read_call(call):
            options.setdefault(option.name, option)
    return options


def _read_call(node: ast.Call) -> Iterator[Option]:
    """Yield the option of `add_argument("-r", "--resume", ...)`."""
    flags = [
        part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    if unparse(node.func).rpartition(".")[2] not in ("add_argument", "add", "arg") or not flags:
        return
    is_flag = flags[0].startswith("-")
    # `group.add("text")` of another class, such as a list
    if len(flags) != len(node.args) or not (is_flag or unparse(node.func).endswith("add_argument")):
        return
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    flag = max(flags, key=len) if is_flag else flags[0]
    name = _read(given.get("dest")) or flag.lstrip("-").replace("-", "_")
    action, count = unparse(given.get("action", ast.Pass())).strip("'\""), _read(given.get("nargs"))
    has_value = action not in _NO_VALUE and count not in ("?", 0)
    default = _read(given["default"]) if "default" in given else (action == "store_false" or None)
    is_required = _read(given.get("required")) is True if is_flag else count not in ("?", "*")
    yield Option(flag, str(name), default, has_value, is_required)


def _read(node: ast.expr | None) -> Any:
    """Return the value of a constant expression; None without one, UNKNOWN of another one."""
    try:
        return ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return UNKNOWN


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
            return _fill("".join(map(_write_field, value.node.values)), parts)
        if isinstance(value.node, ast.BinOp) and len(parts) == 2:
            return self._combine(value.node.op, root(value.options[1]), *parts)
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
        is_folder = option.has_value and option.default is None and _IS_FOLDER.search(option.name)
        if is_folder:
            return self._give(option.flag if option.flag.startswith("-") else "")
        is_text = isinstance(option.default, str) and option.default != ""
        return str(option.default) if is_text else "*"

    def _give(self, flag: str) -> str:
        self.given[flag] = OUT
        return OUT

    def _combine(self, operator: ast.operator, right: Value, first: str, second: str) -> str:
        if isinstance(operator, ast.Mod):
            given = right.parts.values() if right.kind == "list" else (right,)
            return _fill(first, [self.find(part, 1) for part in given])
        joined = os.path.join(first, second) if isinstance(operator, ast.Div) else "*"
        return first + second if isinstance(operator, ast.Add) else joined


def _write_field(part: ast.expr) -> str:
    """Return a part of an f-string as that of format(): a text, {} for a value, {:} for one with a format."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    return "{:}" if getattr(part, "format_spec", None) is not None else "{}"


def _fill(text: str, parts: list[str]) -> str:
    """Return a text with its fields replaced in their order, or by * if they have numbers or names."""
    rest = iter(parts)
    is_ordered = all(field[1] in ":}" or field[0] == "%" for field in _FIELD.findall(text))

    def fill(field: re.Match[str]) -> str:
        part = next(rest, "*") if is_ordered else "*"
        return part if field[0] in ("{}", "%s", "%d") else "*"

    return _FIELD.sub(fill, text)
