"""Find what a program needs, without running it: the modules of its project that it imports, its packages,
and the dependency list that a platform installs before the boot file starts."""

import ast
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bootfile.ground.errors import BadInput

_BY_NAME = ("import_module", "__import__", "import_optional", "run_module")  # functions that import a literal
_HANDLERS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
# The platform's image has these, for its driver and GPUs. torchaudio needs one version of torch.
_OF_THE_IMAGE = re.compile(r"torch|torch-npu|torchvision|torchaudio|triton|nvidia-.+")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_OF_THIS_MACHINE = re.compile(
    r"(?:-e|--editable|-c|--constraint)\b|(?:-f|--find-links)[ =](?!\s*https?:)|\.{0,2}/|file:"
)


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


def find(path: str, root: str, folders: tuple[str, ...]) -> list[Import]:
    """Return the imports of a program.

    path: of the program in the project, with /. root: the project's folder. folders: those in which Python
    looks for a module, in the project, "" for its root, in this order. A program that is not Python imports
    nothing: Python itself names its error.
    """
    try:
        with open(os.path.join(root, path), "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return []
    return [
        Import(getattr(node, "lineno", 0), name, _resolve(path, name, folders, root), is_optional, is_later)
        for node, is_optional, is_later in _walk(tree, is_optional=False, is_later=False)
        for name in _list_imported(node)
    ]


def follow(
    job: str, root: str, folders: tuple[str, ...], enter: Callable[[str, Import], list[str]]
) -> set[str]:
    """Find the imports of a job, and those of the modules that it imports. Return the paths of all these
    programs. enter(path of a program, its import) returns the modules to follow. See find()."""
    programs: set[str] = set()
    todo = [job]
    while todo:
        path = todo.pop()
        if path not in programs:
            programs.add(path)
            todo += [name for imported in find(path, root, folders) for name in enter(path, imported)]
    return programs


def find_packages(root: str, job: str) -> set[str]:
    """Return the packages outside of the folder `root` that a job imports before its main(), by their names
    in Python. Imports inside functions, which come later or never, do not count."""
    packages: set[str] = set()

    def enter(path: str, imported: Import) -> list[str]:
        """Note an import of a package: follow() calls it."""
        if not imported.is_later and not imported.modules:
            packages.add(imported.name.partition(".")[0])
        return [] if imported.is_later else imported.modules

    follow(job, root, ("", os.path.dirname(job)), enter)
    return packages


def _walk(node: ast.AST, is_optional: bool, is_later: bool) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Yield (node, is_optional, is_later) of all nodes below this one: see Import."""
    for child in ast.iter_child_nodes(node):
        optional = is_optional or (_is_optional(node) and child in node.body)  # type: ignore[attr-defined]
        later = is_later or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield child, optional, later
        yield from _walk(child, optional, later)


def _is_optional(node: ast.AST) -> bool:
    """Return whether a program continues if a module in the body of this node is missing."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING")
    handlers = node.handlers if isinstance(node, ast.Try) else []
    names = {part.id for handler in handlers for part in ast.walk(handler) if isinstance(part, ast.Name)}
    return bool(names & _HANDLERS) or any(handler.type is None for handler in handlers)


def _list_imported(node: ast.AST) -> list[str]:
    """Return the dotted names that a node imports, with leading dots if they are relative."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        # each name may be a module, or something in the module before it
        module = "." * node.level + (f"{node.module}." if node.module else "")
        return [module + alias.name for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        # also importlib.import_module
        function = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
        name = node.args[0].value
        return [name] if function in _BY_NAME and isinstance(name, str) else []
    return []


def _resolve(path: str, name: str, folders: tuple[str, ...], root: str) -> list[str]:
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
        # a relative import also reads the __init__.py of its own folder
        candidates = [os.path.join(folder, "__init__.py")] if level else []
        for end in range(1, len(parts) + 1):
            start = os.path.join(folder, *parts[:end])
            candidates += [f"{start}.py", os.path.join(start, "__init__.py")]
        modules = [candidate for candidate in candidates if os.path.isfile(os.path.join(root, candidate))]
        if modules:
            return modules
    return []


def adapt_list(path: str, imported: set[str]) -> tuple[str, list[str]]:
    """Return (text, omitted names) of the dependency list to install, from the one at `path`.

    imported: the packages that the job imports when it starts, by their names in Python. A line of another
    one that ends in a comment `# for: OPTION` becomes a comment.

    torch, torch_npu, torchvision, torchaudio, triton and nvidia-* would replace those of the image, and are
    omitted. Lines about files of this machine are also omitted. Environment markers stay. Raises BadInput.
    """
    kept = []
    left_out = []
    for line in _read_lines(path):
        named = _NAME.match(line)
        package = re.sub(r"[-_.]+", "-", named[0].lower()) if named else ""  # as indexes compare names
        requirement, _, reason = map(str.strip, line.partition("# for:"))
        if _OF_THE_IMAGE.fullmatch(package) or _OF_THIS_MACHINE.match(requirement):
            left_out.append(package or requirement.split()[0])
        else:
            is_needed = not reason or imported & _list_packages(package)
            kept.append(requirement if is_needed else f"# {requirement}  (for: {reason})")
    return "".join(f"{line}\n" for line in kept), left_out


def _list_packages(distribution: str) -> set[str]:
    """Return the names in Python of what an installed distribution holds; none if it is not installed."""
    try:
        installed = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return set()
    listed = (installed.read_text("top_level.txt") or "").split()
    return {*listed} or {file.parts[0].partition(".")[0] for file in installed.files or ()}


def list_names(text: str) -> list[str]:
    """Return the packages of an adapted list, each once, without those in comments."""
    matches = filter(None, map(_NAME.match, text.splitlines()))
    return list(dict.fromkeys(match[0] for match in matches))


def _read_lines(path: str) -> list[str]:
    """Return the requirements of a file, each once, without comments and continuations."""
    folder = os.path.realpath(os.path.dirname(path))
    if os.path.commonpath([folder, os.path.realpath(path)]) != folder:
        raise BadInput(f"{path} is not in the code folder, but its lines would be uploaded")
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = re.sub(r"\\\r?\n\s*", " ", file.read())
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    lines = [re.sub(r"(^|\s+)#(?! for:).*", "", line).strip() for line in text.splitlines()]
    for line in lines:
        if re.match("-r|--requirement", line):
            raise BadInput(f"{path} includes another list, {line}: put its lines here instead")
    return [*filter(None, dict.fromkeys(lines))]
