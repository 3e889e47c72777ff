"""Join a module of bootfile, and the modules of bootfile that it imports, in one file.

`launch new --receipt` writes receipt.py so.
"""

import ast
import sys
from collections.abc import Callable

_PACKAGE = "bootfile"
_Import = ast.Import | ast.ImportFrom


def join(module: str, read: Callable[[str], str]) -> str:
    """Return the text of one file with the functions of a module, which needs no other module of bootfile.

    module: its dotted name. Its docstring is that of the file. read: returns the text of a path below the
    folder that has bootfile. A module of bootfile must be imported with `from bootfile.room.module import
    name`, at the beginning of a file and without `as`: raises ValueError for another import, and if two
    modules define the same name.
    """
    # in the order of their imports, so that a name is defined before another module uses it
    modules = _read_modules(module, read)
    imports: dict[str, set[str]] = {}  # "import os" -> {}; "from typing import" -> names
    bodies = []
    owners: dict[str, str] = {}  # name that is defined at the top of a module -> the module
    for name, (tree, text) in modules.items():
        head, body = _split(name, tree)
        for node in head:
            _add_import(node, imports)
        for statement in body:
            for defined in _find_names(statement):  # in one file the second one would replace the first
                if owners.setdefault(defined, name) != name:
                    raise ValueError(f"{name} and {owners[defined]} define {defined}")
        begin: int | None = 0  # number of the lines before the body: docstring and imports
        if len(body) < len(tree.body):
            begin = tree.body[len(tree.body) - len(body) - 1].end_lineno
        bodies.append("\n".join(text.splitlines()[begin:]).strip("\n"))
    docstring = ast.get_docstring(modules[module][0], clean=False)
    return "\n\n\n".join([f'"""{docstring}"""\n\n{_format_imports(imports)}', *bodies]) + "\n"


def _read_modules(module: str, read: Callable[[str], str]) -> dict[str, tuple[ast.Module, str]]:
    """Return name -> (tree, text) of a module and of all that it imports. A module follows those that it
    imports."""
    modules: dict[str, tuple[ast.Module, str]] = {}

    def add(name: str) -> None:
        """Add the modules that a module imports, then the module itself."""
        if name in modules:
            return
        text = read(f"{name.replace('.', '/')}.py")
        tree = ast.parse(text)
        for imported in _find_modules(name, tree):
            add(imported)
        modules[name] = tree, text

    add(module)
    return modules


def _find_modules(name: str, tree: ast.Module) -> list[str]:
    """Return the modules of bootfile that a module imports. Raises ValueError for an import that join()
    cannot leave out."""
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(_is_ours(alias.name) for alias in node.names):
            raise ValueError(f"{name}, line {node.lineno}: expected `from {_PACKAGE}... import name`")
        if isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
            has_other_name = any(alias.asname for alias in node.names)
            if node not in tree.body or has_other_name or (node.module or "").count(".") < 2:
                raise ValueError(f"{name}, line {node.lineno}: expected an import of names, at the beginning")
            modules.append(node.module or "")
    return modules


def _is_ours(module: str) -> bool:
    """Return whether a dotted name is that of the package that join() puts into one file."""
    return module.partition(".")[0] == _PACKAGE


def _split(name: str, tree: ast.Module) -> tuple[list[_Import], list[ast.stmt]]:
    """Return (the imports, the statements that follow them). Raises ValueError if an import is not at the
    beginning of its module."""
    body = tree.body[ast.get_docstring(tree) is not None :]
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    if imports != body[: len(imports)]:
        raise ValueError(f"{name}: expected all imports at the beginning")
    return imports, body[len(imports) :]


def _add_import(node: _Import, imports: dict[str, set[str]]) -> None:
    """Add an import of another package."""
    if isinstance(node, ast.Import):
        imports.update({f"import {ast.unparse(alias)}": set() for alias in node.names})
    elif not _is_ours(node.module or ""):
        names = {ast.unparse(alias) for alias in node.names}
        imports.setdefault(f"from {node.module} import", set()).update(names)


def _format_imports(imports: dict[str, set[str]]) -> str:
    """Return the lines of the imports: those of the standard library, then those of other packages."""
    groups: list[list[str]] = [[], []]
    for start, names in sorted(imports.items()):
        is_installed = start.split()[1].partition(".")[0] not in sys.stdlib_module_names
        line = start
        if names:
            line += f" {', '.join(sorted(names))}"
        groups[is_installed].append(line)
    groups[0].sort(key=_is_from)  # stable: the names stay in order
    return "\n\n".join("\n".join(group) for group in groups if group)


def _is_from(line: str) -> bool:
    """Return whether a line imports names of a module: such lines follow `import module`."""
    return line.startswith("from")


def _find_names(node: ast.stmt) -> list[str]:
    """Return the names that a statement at the top of a module defines, without those that it imports."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
        names = []
        for target in targets:  # a tuple has several names
            names.extend(part.id for part in ast.walk(target) if isinstance(part, ast.Name))
        return names
    return []
