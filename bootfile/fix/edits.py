"""Change the text of one Python file: insert statements, entries, keywords and imports, and replace nodes.

A place is a node of the syntax tree that `ast` makes of the same bytes, as the facts of lint have it. LibCST
tells what that tree lacks: commas, suites in one line, the indentation and the line ends of the file.
"""

import ast
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import libcst as cst

from bootfile.fix.places import CannotEdit, Places


class Edit(NamedTuple):
    """One change. start, end: offsets of the text that is replaced. order: of edits at the same place."""

    start: int
    end: int
    order: int
    text: str


class Script(Places):
    """A file and the edits that are planned for it. Lines that are inserted are indented as their place; they
    have four spaces for each further level, and get the indentation and line ends of the file.

    Raises CannotEdit if LibCST cannot parse the file. All methods raise it if an edit is not possible: then
    rollback() to the mark() before. Two edits cannot replace the same text; edits at one place keep the order
    in which they were planned.
    """

    def __init__(self, path: str, data: bytes):
        super().__init__(path, data)
        self._edits: list[Edit] = []

    # The plan

    def mark(self) -> int:
        """Return a number for rollback()."""
        return len(self._edits)

    def rollback(self, mark: int) -> None:
        """Forget the edits since a mark."""
        del self._edits[mark:]

    def render(self) -> bytes:
        """Return the new content of the file. Raises CannotEdit if two edits replace the same text."""
        parts, last = [], 0
        for edit in self._sorted():
            parts += [self.text[last : edit.start], edit.text]
            last = edit.end
        return "".join([*parts, self.text[last:]]).encode(self.module.encoding)

    def _sorted(self) -> list[Edit]:
        # what is inserted before a text comes before its replacement
        edits = sorted(self._edits, key=lambda edit: (edit.start, edit.end > edit.start, edit.order))
        for one, other in itertools.pairwise(edits):
            if other.start < one.end:
                raise CannotEdit(f"two repairs change line {self.place(other.start)[0]}")
        return edits

    def _plan(self, start: int, end: int, text: str, is_once: bool = False) -> None:
        is_planned = any((edit.start, edit.end, edit.text) == (start, end, text) for edit in self._edits)
        if not (is_once and is_planned):
            self._edits.append(Edit(start, end, len(self._edits), text))

    # Statements

    def insert_before(self, statement: ast.stmt, lines: Iterable[str], is_once: bool = False) -> None:
        """Insert lines before a statement, below its comments. is_once: unless they are planned there."""
        line = self.place(self.span(statement)[0])[0]
        if not self.is_first(statement):
            raise CannotEdit(f"line {line} has other statements, too")
        text = self._lay_out(lines, self.indent(line))
        self._plan(self.start_of_line(line), self.start_of_line(line), text, is_once)

    def insert_after(self, statement: ast.stmt, lines: Iterable[str], is_once: bool = False) -> None:
        """Insert lines after the last line of a statement, and of others in that line."""
        start, end = self.span(statement)
        line, last = self.place(start)[0], self.place(end)[0]
        suites = [span for node, span in self.spans.items() if isinstance(node, cst.SimpleStatementSuite)]
        if any(first <= start < after for first, after in suites) or not (self.is_last(end) or line == last):
            raise CannotEdit(f"line {line} has other statements, too")
        text = self._lay_out(lines, self.indent(line), is_after=True)
        self._plan(self.end_of_line(last), self.end_of_line(last), text, is_once)

    def insert_first(self, block: Any, lines: Iterable[str]) -> None:
        """Insert lines at the beginning of the body of a loop, function or test, below a docstring."""
        first = block.body[0]
        line = self.place(self.span(first)[0])[0]
        if isinstance(block, ast.FunctionDef) and ast.get_docstring(block, clean=False) is not None:
            self.insert_after(first, lines)
        elif not self.is_first(first):
            self.insert_before(first, lines)
        else:
            text = self._lay_out(lines, self.indent(line))
            while self._is_comment(line - 1):  # those of the first statement
                line -= 1
            self._plan(self.start_of_line(line), self.start_of_line(line), text)

    def _is_comment(self, line: int) -> bool:
        """Return whether a line is blank, or has a comment only."""
        return self.text[self.start_of_line(line) : self.end_of_line(line)].strip()[:1] in ("", "#")

    def guard(self, first: ast.stmt, last: ast.stmt, header: str) -> None:
        """Put statements of one block, from the first to the last, below a line such as `if rank == 0:`."""
        start, end = self.span(first)[0], self.span(last)[1]
        numbers = range(self.place(start)[0], self.place(end)[0] + 1)
        if not self.is_first(first) or not self.is_last(end):
            raise CannotEdit(f"line {numbers[0]} has other statements, too")
        self.insert_before(first, [header])
        texts = [node for node in ast.walk(self.tree) if isinstance(node, ast.Constant | ast.JoinedStr)]
        # the further lines of a text begin with what is in it
        inside = {number for text in texts for number in range(text.lineno + 1, (text.end_lineno or 0) + 1)}
        for number in [number for number in numbers if number not in inside]:
            offset = self.start_of_line(number) + len(self.indent(number))
            if offset < self.end_of_line(number):
                self._plan(offset, offset, self.module.default_indent)

    def move(self, statement: ast.stmt, before: ast.stmt) -> None:
        """Move the lines of a statement before those of another one of its block, each with its comments."""
        start, end = self.span(statement)
        if not self.is_first(statement) or not self.is_last(end) or not self.is_first(before):
            raise CannotEdit(f"line {self.place(start)[0]} has other statements, too")
        first, place = (self.start_of_line(self._find_comments(one)) for one in (statement, before))
        last = min(self.end_of_line(self.place(end)[0]) + len(self.module.default_newline), len(self.text))
        text = self.text[first:last]
        is_whole = text.endswith(self.module.default_newline)
        self._plan(first, last, "")
        self._plan(place, place, text if is_whole else text + self.module.default_newline)

    def _find_comments(self, statement: ast.stmt) -> int:
        """Return the first line of the comments right above a statement, or its own line."""
        line = self.place(self.span(statement)[0])[0]
        while self.text[self.start_of_line(line - 1) : self.start_of_line(line)].strip()[:1] == "#":
            line -= 1
        return line

    def _lay_out(self, lines: Iterable[str], indent: str, is_after: bool = False) -> str:
        newline, text = self.module.default_newline, ""
        for line in lines:
            bare = line.lstrip(" ")
            levels = (len(line) - len(bare)) // 4
            whole = indent + self.module.default_indent * levels + bare if bare else ""
            text += newline + whole if is_after else whole + newline
        return text

    # Expressions

    def replace(self, node: ast.expr, text: str) -> None:
        """Put a text in the place of an expression."""
        self._plan(*self.span(node), text)

    def wrap(self, node: ast.expr, before: str, after: str) -> None:
        """Put an expression between two texts, such as `sorted(` and `)`."""
        start, end = self.span(node)
        self._plan(start, start, before)
        self._plan(end, end, after)

    def add_entry(self, node: ast.Dict, key: str, value: str) -> None:
        """Add an entry at the end of a dict display, in the quotes of its first key."""
        quote = "'" if node.keys and node.keys[0] and self.source(node.keys[0])[0] == "'" else '"'
        text = f"{quote}{key}{quote}: {value}"
        self._add(self.find(node, cst.Dict).elements, self.span(node)[1] - 1, text)

    def add_argument(self, node: ast.Call, text: str) -> None:
        """Add an argument at the end of a call, such as `key=len`."""
        self._add(self.find(node, cst.Call).args, self.span(node)[1] - 1, text)

    def add_parameter(self, node: Any, text: str) -> None:
        """Add a parameter at the end of those of a function, such as `scheduler=None`."""
        found = self.find_function(node).params
        parts = [*found.posonly_params, *found.params, *found.kwonly_params]
        has_stars = found.star_kwarg is not None or found.star_arg not in (None, cst.MaybeSentinel.DEFAULT)
        if not parts or has_stars:
            raise CannotEdit(f"{node.name}() has no list of parameters that can be extended")
        self._add(parts, None, text)

    def _add(self, parts: Any, close: int | None, text: str) -> None:
        """Add a part to those of a display, a call or a function. close: the place of the bracket."""
        if not parts:
            self._plan(close or 0, close or 0, text)
            return
        last = parts[-1]
        # the space after an argument is a part of it
        apart = (cst.Comma, cst.BaseParenthesizableWhitespace)
        children = [child for child in last.children if child in self.spans and not isinstance(child, apart)]
        end = max(self.spans[part][1] for part in (last, *children))
        after, has_comma = end, isinstance(last.comma, cst.Comma)
        if has_comma:
            after += len(self.module.code_for_node(last.comma.whitespace_before)) + 1
        first_line, last_line, line = (
            self.place(offset)[0] for offset in (self.spans[parts[0]][0], self.spans[last][0], end)
        )
        # one part in each line, and the bracket in the next one
        if self.is_last(after) and close is not None and (len(parts) == 1 or first_line != last_line):
            if not has_comma:
                self._plan(end, end, ",", is_once=True)
            place = self.end_of_line(line)
            self._plan(place, place, f"{self.module.default_newline}{self.indent(last_line)}{text},")
        elif has_comma:
            self._plan(after, after, f" {text},")
        else:
            self._plan(end, end, f", {text}")

    # Imports

    def add_import(self, module: str) -> str:
        """Import a module once at the top of the file, and return its name there. Raises CannotEdit if the
        name means something else in the file."""
        name = self.imported(module)
        if name:
            return name
        if module in self.find_bound():
            raise CannotEdit(f"the name {module} has another meaning in {self.path}")
        body, line = self.tree.body, [f"import {module}"]
        imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
        others = [node for node in imports if getattr(node, "module", "") != "__future__"]
        plain = [node for node in imports if isinstance(node, ast.Import) and node.names[0].name < module]
        is_described = ast.get_docstring(self.tree, clean=False) is not None
        # with the imports of the same form, in the order of their names
        after = plain[-1:] or (others and [None]) or imports[-1:] or (body[:1] if is_described else [])
        if after and after[0] is not None:
            self.insert_after(after[0], line, is_once=True)
        else:
            self.insert_before((others or body)[0], line, is_once=True)
        return module
