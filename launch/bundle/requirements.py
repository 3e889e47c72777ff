"""Make the dependency list that a platform installs before the boot file starts. `pack` writes it."""

import ast
import importlib.metadata
import os
import re
from collections.abc import Iterator
from typing import TypeGuard

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained

# The platform's image has these, for its driver and GPUs. torchaudio needs one version of torch.
_OF_THE_IMAGE = re.compile(r"torch|torch-npu|torchvision|torchaudio|triton|nvidia-.+")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_OF_THIS_MACHINE = re.compile(
    r"(?:-e|--editable|-c|--constraint)\b|(?:-f|--find-links)[ =](?!\s*https?:)|\.{0,2}/|file:"
)


def adapt(path: str, imported: set[str]) -> tuple[str, list[str]]:
    """Return (text, omitted names) of the list to install, from the one at `path`.

    imported: the packages that the job imports when it starts, by their names in Python. A line of another
    one that ends in a comment `# for: OPTION` becomes a comment.

    torch, torch_npu, torchvision, torchaudio, triton and nvidia-* would replace those of the image, and are
    omitted. Lines about files of this machine are also omitted. Environment markers stay. Raises BadInput.
    """
    kept = []
    left_out = []
    for line in _read_lines(path):
        named = _NAME.match(line)
        package = ""
        if named:
            package = re.sub(r"[-_.]+", "-", named[0].lower())  # as indexes compare names
        requirement, _, reason = map(str.strip, line.partition("# for:"))
        if _OF_THE_IMAGE.fullmatch(package) or _OF_THIS_MACHINE.match(requirement):
            left_out.append(package or requirement.split()[0])
        elif not reason or imported & _list_packages(package):
            kept.append(requirement)
        else:
            kept.append(f"# {requirement}  (for: {reason})")
    return "".join(f"{line}\n" for line in kept), left_out


def _list_packages(distribution: str) -> set[str]:
    """Return the names in Python of what an installed distribution holds; none if it is not installed."""
    try:
        installed = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return set()
    listed = installed.read_text("top_level.txt")
    if listed:
        return {*listed.split()}
    return {file.parts[0].partition(".")[0] for file in installed.files or ()}


def names(text: str) -> list[str]:
    """Return the packages of an adapted list, each once, without those in comments."""
    matches = filter(None, map(_NAME.match, text.splitlines()))
    return list(dict.fromkeys(match[0] for match in matches))


def _read_lines(path: str) -> list[str]:
    """Return the requirements of a file, without comments and continuations."""
    folder = os.path.realpath(os.path.dirname(path))
    if os.path.commonpath([folder, os.path.realpath(path)]) != folder:
        raise BadInput(f"{path} is not in the code folder, but its lines would be uploaded")
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = re.sub(r"\\\r?\n\s*", " ", file.read())
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    lines: dict[str, None] = {}  # each once, in order
    for raw in text.splitlines():
        line = re.sub(r"(^|\s+)#(?! for:).*", "", raw).strip()
        if re.match("-r|--requirement", line):
            raise BadInput(f"{path} includes another list, {line}: put its lines here instead")
        if line:
            lines[line] = None
    return list(lines)


def find_packages(files: dict[str, str], job: str) -> set[str]:
    """Return the packages outside `files` that a job imports before its main(), by their names in Python.

    files: path of a file, with / -> the file. job: the path of the job. Imports inside functions, which come
    later or never, do not count. Raises BadInput.
    """
    folder = f"{job.rpartition('/')[0]}/"  # its modules can be imported by their names
    seen: set[str] = set()
    todo = [job]
    packages: set[str] = set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in _imports(files[path]):
            parts = name.split(".")
            starts = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
            # Python also looks in the folder of the job
            starts += [folder + start for start in starts]
            modules = []  # of the job that the name imports: its package, and the module itself
            for start in starts:
                for module in (f"{start}.py", f"{start}/__init__.py"):
                    if module in files:
                        modules.append(module)
            todo += modules
            if not modules:
                packages.add(parts[0])
    return packages


def _imports(path: str) -> Iterator[str]:
    """Yield the dotted names that a module imports outside functions."""
    with explained(f"{path} cannot be read"), open(path, "rb") as file:
        try:
            todo: list[ast.AST] = [ast.parse(file.read())]
        except (SyntaxError, ValueError) as error:
            raise BadInput(f"{path} is not a Python program: {error}") from error
    while todo:
        node = todo.pop()
        # what a function imports comes later, or never
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        elif _is_import_optional(node):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield str(argument.value)
        todo += ast.iter_child_nodes(node)


def _is_import_optional(node: ast.AST) -> TypeGuard[ast.Call]:
    """Return whether a node is a call of import_optional(), which imports a package by its name."""
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "import_optional"
    )
