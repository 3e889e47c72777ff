"""Read Python files: their trees and the comments that turn rules off. Nothing is executed."""

import ast
import re
import warnings
from typing import Any, NamedTuple

from bootfile.ground.errors import BadInput

LARGEST = 2_000_000  # bytes of a file that is read
_IGNORE = re.compile(r"#\s*bootfile:\s*ignore(?P<rules>(?:[\s,]+R\d{3})*)")
_RULE = re.compile(r"R\d{3}")


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
    return Source(path, _parse(path, data), _find_ignored(data), data)


def _parse(path: str, data: bytes) -> ast.Module:
    try:
        # a file of another may have escapes that Python warns of
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(data, filename=path)
    except SyntaxError as error:
        place = f", line {error.lineno}" if error.lineno else ""
        raise BadInput(f"{path}: not Python that this version can parse{place}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8: {error.reason}") from error
    except ValueError as error:
        raise BadInput(f"{path}: not Python: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise BadInput(f"{path}: nested too deeply to be parsed") from error


def _find_ignored(data: bytes) -> dict[int, set[str]]:
    """Return the rules that comments turn off, by line."""
    ignored: dict[int, set[str]] = {}
    if b"bootfile:" not in data:
        return ignored
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        match = _IGNORE.search(line)
        if match:
            ignored[number] = set(_RULE.findall(match["rules"])) or {"all"}
    return ignored
