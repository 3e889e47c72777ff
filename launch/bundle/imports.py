"""Find the modules of a project that a program imports, without running it."""

import ast
import os
from collections.abc import Iterator
from typing import NamedTuple

_BY_NAME = ("import_module", "__import__", "import_optional", "run_module")  # functions that import a literal
_HANDLERS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


class Import(NamedTuple):
    """An import of a program.

    line: its line. name: the dotted name as the program has it, with the dots of a relative import.
    modules: the files that it reads, relative to the root, with /: those of its packages, then its own.
    is_optional: whether the program continues without it: in a `try`, or only for types.
    is_later: whether it is in a function.
    """

    line: int
    name: str
    modules: list[str]
    is_optional: bool
    is_later: bool


def find(root: str, path: str, folders: tuple[str, ...]) -> list[Import]:
    """Return the imports of modules below `root` in the program root/path. CodeFolder follows them.

    path: with /. folders: those in which Python looks for a module, relative to the root, "" for the root
    itself, in this order. A program that is not Python imports nothing: Python itself names its error.
    """
    try:
        with open(os.path.join(root, path), "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return []
    imports = []
    for node, is_optional, is_later in _walk(tree, is_optional=False, is_later=False):
        for name in _list_names(node):
            modules = _resolve(root, path, name, folders)
            if modules:
                imports.append(Import(getattr(node, "lineno", 0), name, modules, is_optional, is_later))
    return imports


def _walk(node: ast.AST, is_optional: bool, is_later: bool) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Yield (node, is_optional, is_later) of all nodes below this one: see Import."""
    for child in ast.iter_child_nodes(node):
        optional = is_optional
        if isinstance(node, ast.Try) and child in node.body:
            optional = optional or any(_catches_import(handler) for handler in node.handlers)
        elif isinstance(node, ast.If) and child in node.body:
            optional = optional or ast.unparse(node.test).endswith("TYPE_CHECKING")
        later = is_later or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield child, optional, later
        yield from _walk(child, optional, later)


def _catches_import(handler: ast.ExceptHandler) -> bool:
    """Return whether an `except` catches the error of a module that is missing."""
    if handler.type is None:
        return True
    names = {part.id for part in ast.walk(handler.type) if isinstance(part, ast.Name)}
    return bool(names & _HANDLERS)


def _list_names(node: ast.AST) -> list[str]:
    """Return the dotted names that a node imports, with leading dots if they are relative."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        # a name is a module, or what the module before it holds
        names = []
        for alias in node.names:
            separator = "." if node.module else ""
            names.append(f"{module}{separator}{alias.name}")
        return names
    if isinstance(node, ast.Call) and node.args:
        function = getattr(node.func, "id", "")
        if isinstance(node.func, ast.Attribute):  # importlib.import_module
            function = node.func.attr
        literal = node.args[0]
        if function in _BY_NAME and isinstance(literal, ast.Constant) and isinstance(literal.value, str):
            return [literal.value]
    return []


def _resolve(root: str, path: str, name: str, folders: tuple[str, ...]) -> list[str]:
    """Return the files below the root that a name reads, its packages first; [] for other packages."""
    absolute = name.lstrip(".")
    level = len(name) - len(absolute)
    if level:  # relative to the folder of the program, or to one above it
        above = path.split("/")[:-1]
        if level - 1 > len(above):
            return []
        folders = ("/".join(above[: len(above) - level + 1]),)
    parts = [part for part in absolute.split(".") if part not in ("", "*")]
    if not all(part.isidentifier() for part in parts):  # a text such as "../x" is a path
        return []
    # as Python does: the first folder that has the name
    for folder in folders:
        modules = []
        for end in range(len(parts) + 1):
            if end == 0 and not level:
                continue
            start = os.path.join(folder, *parts[:end])
            candidates = [os.path.join(start, "__init__.py")]
            if end:  # `from . import x` reads only the folder
                candidates.insert(0, f"{start}.py")
            for candidate in candidates:
                if os.path.isfile(os.path.join(root, candidate)):
                    modules.append(candidate)
        if modules:
            return modules
    return []
