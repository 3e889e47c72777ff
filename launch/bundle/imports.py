"""Find the modules of a project, and the packages, that a program imports, without running it."""

import ast
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

_BY_NAME = ("import_module", "__import__", "import_optional", "run_module")  # functions that import a literal
_HANDLERS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


class Import(NamedTuple):
    """An import of a program.

    line: its line. name: the dotted name as the program has it, with the dots of a relative import.
    modules: the files of the project that it reads, with /: those of its packages, then its own.
    is_optional: whether the program continues without it: in a `try`, or only for types.
    is_later: whether it is in a function.
    """

    line: int
    name: str
    modules: list[str]
    is_optional: bool
    is_later: bool


def find(path: str, source: str, folders: tuple[str, ...], exists: Callable[[str], bool]) -> list[Import]:
    """Return the imports of a program. CodeFolder and find_packages() follow them.

    path: in the project, with /. source: the file. folders: those in which Python looks for a module, in the
    project, "" for its root, in this order. exists: whether the project has a file. A program that is not
    Python imports nothing: Python itself names its error.
    """
    try:
        with open(source, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return []
    imports = []
    for node, is_optional, is_later in _walk(tree, is_optional=False, is_later=False):
        for name in _list_names(node):
            modules = _resolve(path, name, folders, exists)
            imports.append(Import(getattr(node, "lineno", 0), name, modules, is_optional, is_later))
    return imports


def find_packages(files: dict[str, str], job: str) -> set[str]:
    """Return the packages outside `files` that a job imports before its main(), by their names in Python.

    files: path of a file, with / -> the file. job: the path of the job. Imports inside functions, which come
    later or never, do not count.
    """
    packages: set[str] = set()
    seen: set[str] = set()
    todo = [job]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for imported in find(path, files[path], ("", os.path.dirname(job)), files.__contains__):
            if imported.is_later:
                continue
            todo += imported.modules
            if not imported.modules:
                packages.add(imported.name.partition(".")[0])
    return packages


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
    names = {part.id for part in ast.walk(handler.type or handler) if isinstance(part, ast.Name)}
    return handler.type is None or bool(names & _HANDLERS)


def _list_names(node: ast.AST) -> list[str]:
    """Return the dotted names that a node imports, with leading dots if they are relative."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        # each name may be a module, or something in the module before it
        module = "." * node.level
        if node.module:
            module += f"{node.module}."
        return [module + alias.name for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        # also importlib.import_module
        function = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
        name = node.args[0].value
        return [name] if function in _BY_NAME and isinstance(name, str) else []
    return []


def _resolve(path: str, name: str, folders: tuple[str, ...], exists: Callable[[str], bool]) -> list[str]:
    """Return the files of the project that a name reads, its packages first; [] for other packages."""
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
        candidates = []
        first = 0 if level else 1  # a relative import also reads the __init__.py of its own folder
        for end in range(first, len(parts) + 1):
            start = os.path.join(folder, *parts[:end])
            if start != folder:
                candidates.append(f"{start}.py")
            candidates.append(os.path.join(start, "__init__.py"))
        modules = [candidate for candidate in candidates if exists(candidate)]
        if modules:
            return modules
    return []
