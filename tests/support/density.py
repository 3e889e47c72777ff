"""Measure how dense the code of each room is: what a reader has to decode instead of read.

    python -m tests.support.density                    a table of all rooms
    python -m tests.support.density bootfile/receipt   also each place in one room

A room is a folder in one of the packages, or the files directly in a package.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bootfile", "common", "datasets", "jobs", "launch")
# names that say nothing about what they hold
NAMES = ("each", "own", "found")
COMPACT = (
    ast.IfExp, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda,
)  # fmt: skip
# the kinds of places that find_places() returns
NESTED = "nested ternary"
MULTIPLIED = "if as arithmetic"
TUPLE = "tuple of assignments"
LAMBDA = "lambda in place of a def"
NAME = "name"
SKIP = "fmt: skip"
KINDS = (NESTED, MULTIPLIED, TUPLE, LAMBDA, NAME, SKIP)

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_CONTAINERS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
# calls that return a bool, and the first words of names that hold one
_QUESTIONS = ("bool", "isinstance", "issubclass", "hasattr", "callable", "any", "all")
_QUESTION_WORDS = ("is", "has", "are", "was", "can", "may", "must")


class Place(NamedTuple):
    """One dense place. kind: one of KINDS. text: the expression, or the name."""

    line: int
    kind: str
    text: str


class Room(NamedTuple):
    """The measures of a room.

    places: the number of places of each kind.
    compact: ternaries, walruses, comprehensions and lambdas per 1,000 lines.
    comments: comment lines inside functions per 1,000 lines.
    """

    lines: int
    places: Counter[str]
    compact: float
    comments: float


def find_rooms() -> dict[str, list[Path]]:
    """Return the files of each room, by its folder ("bootfile/receipt"); "bootfile": files directly in it."""
    rooms: dict[str, list[Path]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            folders = path.relative_to(ROOT).parts[:-1]
            rooms.setdefault("/".join(folders[:2]), []).append(path)
    return rooms


def measure(paths: list[Path]) -> Room:
    """Return the measures of some files."""
    places: Counter[str] = Counter()
    lines = 0
    compact = 0
    comments = 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines += len(text.splitlines())
        places.update(place.kind for place in find_places(text))
        compact += sum(isinstance(node, COMPACT) for node in ast.walk(tree))
        comments += count_comments(text)
    thousands = max(lines, 1) / 1000
    return Room(lines, places, compact / thousands, comments / thousands)


def find_places(text: str) -> list[Place]:
    """Return the dense places in the text of a file, by line."""
    tree = ast.parse(text)
    places = [*_find_names(tree), *_find_skips(text, tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp) and _contains_ternary(node):
            places.append(Place(node.lineno, NESTED, ast.unparse(node)))
        if _is_if_as_arithmetic(node):
            places.append(Place(node.lineno, MULTIPLIED, ast.unparse(node)))
        if isinstance(node, ast.Assign) and _assigns_several(node):
            places.append(Place(node.lineno, TUPLE, ast.unparse(node)))
    for function in _find_lambdas(tree):
        places.append(Place(function.lineno, LAMBDA, ast.unparse(function)))
    return sorted(places)


def count_comments(text: str) -> int:
    """Return the number of lines inside functions that have a comment, without directives of tools."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _FUNCTIONS):
            inside.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = set()
    for token in _tokens(text):
        is_directive = token.string.startswith(("# fmt:", "# noqa", "# type:"))
        if token.type == tokenize.COMMENT and not is_directive and token.start[0] in inside:
            lines.add(token.start[0])
    return len(lines)


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(text).readline)


def _contains_ternary(node: ast.IfExp) -> bool:
    """Return whether a part of a ternary is another one."""
    for part in (node.test, node.body, node.orelse):
        if any(isinstance(inner, ast.IfExp) for inner in ast.walk(part)):
            return True
    return False


def _is_if_as_arithmetic(node: ast.AST) -> bool:
    """Return whether a sum or a product has a bool as an operand: `"s" * (count > 1)`, `count += line == ""`.

    Comparisons of whole arrays look the same. numpy.where() says what they mean.
    """
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Add | ast.Sub | ast.Mult) and _is_question(node.value)
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
        return False
    return _is_question(node.left) or _is_question(node.right)


def _is_question(node: ast.expr) -> bool:
    """Return whether an expression is a bool, as far as its form shows it."""
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return True
    if isinstance(node, ast.BoolOp):
        return any(_is_question(value) for value in node.values)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _QUESTIONS
    name = ""
    if isinstance(node, ast.Name):
        name = node.id
    elif isinstance(node, ast.Attribute):
        name = node.attr
    first_word, has_more, _ = name.lstrip("_").partition("_")
    return bool(has_more) and first_word in _QUESTION_WORDS


def _assigns_several(node: ast.Assign) -> bool:
    """Return whether a statement gives several names their values: `a, b = x, y` and `a = b = x`.

    Not `a, b = b, a`, which needs all old values. Not `a = b.c = call()`: the name is for what was made once.
    """
    if len(node.targets) > 1:
        return isinstance(node.value, ast.Constant | ast.UnaryOp)
    target, value = node.targets[0], node.value
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return False
    if any(isinstance(element, ast.Starred) for element in [*target.elts, *value.elts]):
        return False
    assigned = {ast.unparse(element) for element in target.elts}
    read = {ast.unparse(part) for part in ast.walk(value) if isinstance(part, ast.expr)}
    return not assigned & read


def _find_lambdas(tree: ast.AST) -> list[ast.Lambda]:
    """Return the lambdas except those that only choose the key of a sort, or make a default."""
    keys = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("key", "default_factory"):
            keys.add(node.value)
    return [node for node in ast.walk(tree) if isinstance(node, ast.Lambda) and node not in keys]


def _find_names(tree: ast.AST) -> list[Place]:
    """Return where a variable or a parameter has one of NAMES."""
    places = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES:
            places.append(Place(node.lineno, NAME, node.id))
        elif isinstance(node, ast.arg) and node.arg in NAMES:
            places.append(Place(node.lineno, NAME, node.arg))
    return places


def _find_skips(text: str, tree: ast.AST) -> list[Place]:
    """Return the `fmt: skip` and `fmt: off` of statements that are not a table: a list, tuple, set or
    dictionary of constants."""
    table_lines: set[int] = set()
    for node in ast.walk(tree):
        is_assignment = isinstance(node, ast.Assign | ast.AnnAssign)
        if is_assignment and isinstance(node.value, _CONTAINERS) and node.end_lineno:
            table_lines.update(range(node.lineno - 1, node.end_lineno + 1))
    places = []
    for token in _tokens(text):
        is_skip = token.type == tokenize.COMMENT and token.string.startswith(("# fmt: skip", "# fmt: off"))
        if is_skip and token.start[0] not in table_lines:
            places.append(Place(token.start[0], SKIP, token.line.strip()))
    return places


def main(arguments: list[str]) -> None:
    """Print the table of all rooms, and the places in the rooms that are named."""
    rooms = find_rooms()
    for room in arguments:
        for path in rooms[room]:
            for place in find_places(path.read_text(encoding="utf-8")):
                print(f"{path.relative_to(ROOT)}:{place.line}: {place.kind}: {place.text}")
    headings = (*KINDS, "compact/1000", "comments/1000", "lines")
    print(f"{'room':<24}" + "".join(f"{heading:>26}" for heading in headings))
    for room, paths in rooms.items():
        measures = measure(paths)
        counts = [str(measures.places[kind]) for kind in KINDS]
        values = [*counts, f"{measures.compact:.0f}", f"{measures.comments:.0f}", str(measures.lines)]
        print(f"{room:<24}" + "".join(f"{value:>26}" for value in values))


if __name__ == "__main__":
    main(sys.argv[1:])
