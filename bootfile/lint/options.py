"""The options that a script declares: with argparse, with click, or as fields of a dataclass that a parser
such as HfArgumentParser reads."""

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple

from bootfile.lint.sources import Source, unparse

_DECLARES = ("add_argument", "add", "arg", "option", "argument")
_NO_VALUE = ("store_true", "store_false", "count", "argparse.BooleanOptionalAction", "BooleanOptionalAction")
_READS_FIELDS = ("HfArgumentParser", "TrlParser", "simple_parsing")
UNKNOWN = object()  # a default that is not constant


class Option(NamedTuple):
    """One option. flag: "--resume"; the name of an argument by place. default: None without one, UNKNOWN if
    it is not constant. has_value: it is followed by a value. is_required: the script refuses to start without
    it."""

    flag: str
    name: str
    default: Any
    has_value: bool
    is_required: bool
    path: str
    line: int


def find_options(sources: list[Source]) -> dict[str, Option]:
    """Return the options of a script and the modules of its project, by the name of their value."""
    options: dict[str, Option] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            found: Iterator[Option] = iter(())
            if isinstance(node, ast.Call):
                found = _read_call(source, node)
            elif isinstance(node, ast.ClassDef) and any(part in _text(source) for part in _READS_FIELDS):
                found = _read_fields(source, node)
            for option in found:
                options.setdefault(option.name, option)
    return options


def _text(source: Source) -> str:
    return source.data.decode(errors="replace")


def _read_call(source: Source, node: ast.Call) -> Iterator[Option]:
    """Yield the option of `add_argument("-r", "--resume", ...)` and of `@click.option("--resume", ...)`."""
    declares = unparse(node.func).rpartition(".")[2]
    texts = [part.value for part in node.args if isinstance(part, ast.Constant)]
    flags = [text for text in texts if isinstance(text, str)]
    if declares not in _DECLARES or not flags or flags != texts:
        return
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    is_flag = flags[0].startswith("-")
    # `group.add("text")` of another class, such as a list
    if not is_flag and declares not in ("add_argument", "argument"):
        return
    flag = max((name.partition("/")[0] for name in flags), key=len) if is_flag else flags[0]
    name = _read(given.get("dest")) or flag.lstrip("-").replace("-", "_")
    action, count = unparse(given.get("action", ast.Pass())).strip("'\""), _read(given.get("nargs"))
    has_value = not (action in _NO_VALUE or count in ("?", 0) or _read(given.get("is_flag")) is True)
    default = _read(given["default"]) if "default" in given else (action == "store_false" or None)
    is_required = _read(given.get("required")) is True if is_flag else count not in ("?", "*")
    yield Option(flag, str(name), default, has_value, is_required, source.path, node.lineno)


def _read_fields(source: Source, node: ast.ClassDef) -> Iterator[Option]:
    """Yield the fields of a dataclass."""
    if not any(unparse(part).rpartition(".")[2].startswith("dataclass") for part in node.decorator_list):
        return
    for part in node.body:
        if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name):
            continue
        value, name = part.value, part.target.id
        if isinstance(value, ast.Call):  # field(default=...)
            given = {keyword.arg: keyword.value for keyword in value.keywords}
            value = given.get("default", value if "default_factory" in given else None)
        has_value = not (unparse(part.annotation) == "bool" and _read(value) is False)
        yield Option(f"--{name}", name, _read(value), has_value, value is None, source.path, part.lineno)


def _read(node: ast.expr | None) -> Any:
    """Return the value of a constant expression; None without one, UNKNOWN of another one."""
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return UNKNOWN
