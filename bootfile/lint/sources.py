"""Read Python files, the comments that turn rules off, and the modules of their project that they import.
Nothing is executed."""

import ast
import contextlib
import os
import pathlib
import re
import warnings
from typing import Any, NamedTuple

from bootfile.ground.errors import BadInput

LARGEST = 2_000_000  # bytes of a file that is read
_IGNORE = re.compile(r"#\s*bootfile:\s*ignore(?P<rules>(?:[\s,]+R\d{3})*)")
_RULE = re.compile(r"R\d{3}")
MOST_MODULES = 150
MOST_PARSED = 600  # modules that stay in memory for the next script
# packages that a folder of the same name next to a script does not replace
_OF_OTHERS = {
    "bootfile",
    "torch", "torchvision", "numpy", "accelerate", "transformers", "lightning", "pytorch_lightning", "apex",
    "os", "sys", "random", "math", "time", "glob", "json", "argparse", "logging", "copy", "re", "shutil",
    "collections", "itertools", "functools", "typing", "dataclasses", "pathlib", "signal", "pickle", "tqdm",
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LISTINGS = re.compile(r"^(os\.listdir|os\.scandir|glob\.glob|glob\.iglob|glob|listdir|iglob)$")
_PATH_LISTINGS = ("iterdir", "glob", "rglob")


class Source(NamedTuple):
    """A file: its tree, its text, and the rules that a comment turns off by line ("all" for a comment without
    a rule)."""

    path: str
    tree: ast.Module
    ignored: dict[int, set[str]]
    data: bytes

    def find(self, kind: Any) -> list[Any]:
        """Return the nodes of a kind, in the order of ast.walk()."""
        return [node for node in ast.walk(self.tree) if isinstance(node, kind)]

    def parents(self) -> dict[ast.AST, ast.AST]:
        """Return the node around each node. The tree keeps it for other scripts that import it."""
        kept: dict[ast.AST, ast.AST] | None = getattr(self.tree, "bootfile_parents", None)
        if kept is None:
            kept = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
            self.tree.bootfile_parents = kept  # type: ignore[attr-defined]
        return kept


def read(path: str) -> Source:
    """Read and parse a file. Raises BadInput with one line if it cannot be read or parsed."""
    # its JSON parses as a Python expression, which does nothing
    if path.lower().endswith(".ipynb"):
        raise BadInput(f"{path}: a notebook: jupyter nbconvert --to script {path} first")
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from error
    if len(data) > LARGEST:
        raise BadInput(f"{path}: larger than {LARGEST // 1_000_000} MB, which is the most that lint reads")
    return parse(path, data)


def parse(path: str, data: bytes) -> Source:
    """Parse the content of a file. Raises BadInput with one line if it is not Python."""
    try:
        # a file of another may have escapes that Python warns of
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(data, filename=path)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place, reason = f", line {line}" if line else "", getattr(error, "msg", error)
        raise BadInput(f"{path}: not Python that this version can parse{place}: {reason}") from error
    except (RecursionError, MemoryError) as error:
        raise BadInput(f"{path}: nested too deeply to be parsed") from error
    lines = data.decode(errors="replace").splitlines() if b"bootfile:" in data else []
    matches = [(number, _IGNORE.search(line)) for number, line in enumerate(lines, 1)]
    ignored = {number: set(_RULE.findall(match["rules"])) or {"all"} for number, match in matches if match}
    return Source(path, tree, ignored, data)


class Project:
    """The modules of the project of a script, by path. A module that cannot be read counts as unknown.

    parsed: modules that other scripts of the same command have read, to which it adds its own.
    """

    def __init__(self, script: str, parsed: "dict[str, Source | None] | None" = None):
        folder = pathlib.Path(os.path.abspath(script)).parent
        # a script in a package imports from the folder of the package; the root of the machine is none
        folders = [folder, *[above for above in folder.parents[:3] if above != above.parent]]
        # scripts add these to sys.path
        added = [above / name for above in folders[:2] for name in ("lib", "src")]
        self._roots = [str(path) for path in [*folders, *filter(os.path.isdir, added)]]
        self._found: dict[tuple[str, str], str] = {}
        self._parsed: dict[str, Source | None] = {} if parsed is None else parsed
        self._read: set[str] = set()

    def find(self, module: str, level: int = 0, importer: str = "") -> str:
        """Return the path of a module, "" if it is not one of the project. level: dots of a relative import
        in the file `importer`."""
        relative = module.replace(".", os.sep)
        if level:
            folder = os.path.normpath(os.path.join(os.path.abspath(importer), *[os.pardir] * level))
            return self._find_below(folder, relative)
        roots = [] if module.partition(".")[0] in _OF_OTHERS else self._roots
        return next(filter(None, (self._find_below(folder, relative) for folder in roots)), "")

    def read(self, path: str) -> Source | None:
        """Return a module; None if it cannot be read, or if the project is too large."""
        self._read.add(path)
        # what lies beyond counts as unknown, about which the rules are silent
        if len(self._read) > MOST_MODULES:
            return None
        if path in self._parsed:
            return self._parsed[path]
        source = None
        with contextlib.suppress(BadInput):
            source = read(path)
        if len(self._parsed) < MOST_PARSED:
            self._parsed[path] = source
        return source

    def _find_below(self, folder: str, relative: str) -> str:
        place = (folder, relative)
        if place not in self._found:
            stem = os.path.join(folder, relative)
            paths = (f"{stem}.py", os.path.join(stem, "__init__.py"))
            self._found[place] = next((path for path in paths if os.path.isfile(path)), "")
        return self._found[place]


# Questions about the syntax tree of a script


def unparse(node: ast.AST) -> str:
    """Return the text of a node; "" if it is nested too deeply. The node keeps its text: a function that is
    called often has the same conditions each time."""
    text = getattr(node, "bootfile_text", None)
    if text is None:
        try:
            text = ast.unparse(node)
        except (RecursionError, ValueError, AttributeError):
            text = ""
        with contextlib.suppress(AttributeError):
            node.bootfile_text = text  # type: ignore[attr-defined]
    return str(text)


def list_called(tree: ast.Module) -> set[str]:
    """Return the names of the functions that a module calls or gives to others."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return {name.id for name in names if isinstance(name.ctx, ast.Load)}


def list_assigned(function: Any) -> set[str]:
    """Return the names to which a function assigns. The node keeps them."""
    names: set[str] | None = getattr(function, "bootfile_assigned", None)
    if names is None:
        nodes = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        names = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
        function.bootfile_assigned = names
    return names


def is_modulo(node: Any) -> bool:
    """Return whether an expression has the rest of a division in it; a text such as "%d" % step is none."""
    parts = [part for part in ast.walk(node) if isinstance(part, ast.BinOp)] if node is not None else []
    lefts = [part.left for part in parts if isinstance(part.op, ast.Mod)]
    return any(not isinstance(getattr(left, "value", 0), str) for left in lefts)


def place_of_entry(node: Any) -> tuple[bool, int]:
    return node.name not in ("main", "main_worker", "train_net", "train_main", "run"), node.lineno


def find_counted(node: Any) -> Any:
    """Return the target of `x += ...`, `x -= 1` or `x = x + 1`; None for other nodes."""
    if isinstance(node, ast.AugAssign):
        is_sum = isinstance(node.op, ast.Add | ast.Sub) and isinstance(node.target, ast.Name | ast.Attribute)
        return node.target if is_sum else None
    if not isinstance(node, ast.Assign) or len(node.targets) > 1 or not isinstance(node.value, ast.BinOp):
        return None
    target = node.targets[0]
    is_sum = isinstance(node.value.op, ast.Add) and isinstance(node.value.right, ast.Constant)
    is_name = is_sum and isinstance(target, ast.Name | ast.Attribute)
    return target if is_name and unparse(target) == unparse(node.value.left) else None


def walk_loop(node: Any) -> list[ast.AST]:
    """Return the nodes in the body of a loop, without those of inner functions."""
    nodes: list[ast.AST] = []
    todo: list[ast.AST] = list(node.body)
    while todo:
        current = todo.pop()
        if isinstance(current, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            continue
        nodes.append(current)
        todo += ast.iter_child_nodes(current)
    return nodes


def is_main_test(node: ast.expr) -> bool:
    left = node.left if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq) else None
    return isinstance(left, ast.Name) and left.id == "__name__"


def is_property(node: Any) -> bool:
    return any(unparse(decorator) in ("property", "cached_property") for decorator in node.decorator_list)


def trains_itself(node: ast.ClassDef) -> bool:
    """Return whether a module has its own optimizers, as those of GANs do."""
    names = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    return bool(names & {"backward", "optim", "Adam", "zero_grad"})


def list_above(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> list[Any]:
    """Return the nodes around a node, from the inside."""
    above = []
    while node in parents:
        node = parents[node]
        above.append(node)
    return above


def is_listing(node: ast.Call) -> bool:
    """Return whether a call lists the files of a folder."""
    name = unparse(node.func)
    is_method = isinstance(node.func, ast.Attribute) and node.func.attr in _PATH_LISTINGS
    return _LISTINGS.match(name) is not None or (is_method and "glob." not in name)


def ignores_index(function: Any) -> bool:
    """Return whether a __getitem__() does not read the number of the sample: it draws one."""
    arguments = function.args.args
    names = {part.id for part in ast.walk(function) if isinstance(part, ast.Name)}
    return len(arguments) > 1 and arguments[1].arg not in names
