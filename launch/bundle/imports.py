"""Find the packages that a job imports when it starts, from the text of its modules."""

import ast
from collections.abc import Iterator

from common.ground.exits import BadInput
from common.ground.files import explained


def find_packages(files: dict[str, str], job: str) -> set[str]:
    """Return the packages outside `files` that a job imports before its main(), by their names in Python.

    files: path of a file, with / -> the file. job: the path of the job. Imports inside functions, which come
    later or never, do not count. Raises BadInput.
    """
    folder = f"{job.rpartition('/')[0]}/"  # its modules can be imported by their names
    seen, todo, found = set[str](), [job], set[str]()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in _imports(files[path]):
            parts = name.split(".")
            starts = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
            starts += [folder + start for start in starts]
            ours = [
                each for start in starts for each in (f"{start}.py", f"{start}/__init__.py") if each in files
            ]
            todo += ours
            if not ours:
                found.add(parts[0])
    return found


def _imports(path: str) -> Iterator[str]:
    """Yield the dotted names that a module imports outside functions."""
    with explained(f"{path} cannot be read"), open(path, "rb") as file:
        try:
            todo: list[ast.AST] = [ast.parse(file.read())]
        except (SyntaxError, ValueError) as error:
            raise BadInput(f"{path} is not a Python program: {error}") from error
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "import_optional"
        ):
            yield from (str(each.value) for each in node.args[:1] if isinstance(each, ast.Constant))
        todo += ast.iter_child_nodes(node)
