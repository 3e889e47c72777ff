"""The text of a Python file and its places: the offsets, lines and LibCST nodes for nodes of `ast`."""

import ast
import bisect
import re
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
_COMMENT = re.compile(r"[ \t\f]*(#[^\r\n]*)?")


class CannotEdit(Exception):
    """A repair is not possible here. Its text is the reason, for the user."""


class Places:
    """A file, its syntax tree and its places. Offsets count characters from the beginning of the text."""

    def __init__(self, path: str, data: bytes):
        self.path = path
        try:
            wrapper = MetadataWrapper(cst.parse_module(data), unsafe_skip_copy=True)
        except (cst.ParserSyntaxError, UnicodeDecodeError, RecursionError) as error:
            raise CannotEdit(f"LibCST cannot parse {path}") from error
        self.module = wrapper.module
        self.text = data.decode(self.module.encoding)
        self.tree = ast.parse(data)
        self._lines = [match.group() for match in _LINE.finditer(self.text)]
        self._starts = [match.start() for match in _LINE.finditer(self.text)]
        self.spans: dict[cst.CSTNode, tuple[int, int]] = {}
        self._nodes: dict[tuple[int, int], list[cst.CSTNode]] = {}
        for node, place in wrapper.resolve(PositionProvider).items():
            start, end = (self._starts[one.line - 1] + one.column for one in (place.start, place.end))
            self.spans[node] = (start, end)
            self._nodes.setdefault((start, end), []).append(node)

    def span(self, node: Any) -> tuple[int, int]:
        """Return the offsets of the start and the end of a node of `ast`, a function with its decorators."""
        end = self._offset(node.end_lineno, node.end_col_offset)
        decorators = getattr(node, "decorator_list", [])
        # the "@" stands before the expression of a decorator
        if decorators:
            return self.start_of_line(decorators[0].lineno) + len(self.indent(decorators[0].lineno)), end
        return self._offset(node.lineno, node.col_offset), end

    def _offset(self, line: int, column: int) -> int:
        # ast counts bytes of UTF-8
        text = self._lines[line - 1].encode("utf-8")[:column]
        return self._starts[line - 1] + len(text.decode("utf-8"))

    def source(self, node: Any) -> str:
        """Return the text of a node, as the file has it."""
        start, end = self.span(node)
        return self.text[start:end]

    def place(self, offset: int) -> tuple[int, int]:
        """Return the line (from 1) and the column (in characters, from 0) of an offset."""
        line = bisect.bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1]

    def indent(self, line: int) -> str:
        text = self._lines[line - 1]
        return text[: len(text) - len(text.lstrip(" \t\f"))]

    def start_of_line(self, line: int) -> int:
        return self._starts[line - 1]

    def end_of_line(self, line: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].rstrip("\r\n"))

    def is_first(self, statement: ast.stmt) -> bool:
        """Return whether nothing stands before a statement in its line."""
        start, _ = self.span(statement)
        line, column = self.place(start)
        return column == len(self.indent(line))

    def is_last(self, offset: int) -> bool:
        """Return whether only a comment follows an offset in its line."""
        return _COMMENT.fullmatch(self.text, offset, self.end_of_line(self.place(offset)[0])) is not None

    def find(self, node: Any, kind: Any) -> Any:
        """Return the node of LibCST of one of `ast`. Raises CannotEdit if there is none of the kind."""
        found = [one for one in self._nodes.get(self.span(node), []) if isinstance(one, kind)]
        if not found:
            raise CannotEdit(f"line {node.lineno} has a form that is not edited")
        return found[0]

    def find_function(self, node: Any) -> cst.FunctionDef:
        for found, (start, _) in self.spans.items():
            is_same = isinstance(found, cst.FunctionDef) and found.name.value == node.name
            if isinstance(found, cst.FunctionDef) and is_same and self.place(start)[0] == node.lineno:
                return found
        raise CannotEdit(f"line {node.lineno} has a form that is not edited")

    def find_bound(self) -> set[str]:
        """Return all names that the file binds anywhere, but for `import name` at its top."""
        names = set()
        top = self.tree.body
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Import) and node not in top:
                # within a function the name is a local one, which may not be bound yet
                names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        return names

    def imported(self, module: str) -> str:
        """Return the name that the top of the file gives to a module; "" if it does not import it, or if the
        name has another meaning anywhere in the file."""
        for node in self.tree.body:
            for alias in node.names if isinstance(node, ast.Import) else []:
                name = alias.asname or module
                is_named = alias.name == module and (alias.asname or "." not in module)
                if is_named and name not in self.find_bound():
                    return name
        return ""
