"""Change the text of one Python file: insert statements, entries, keywords and imports, and replace nodes.

A place is a node of the syntax tree that `ast` makes of the same bytes, as the facts of lint have it. The
tokens of the file tell what that tree lacks: commas, comments and the indentation. Offsets count characters
from the beginning of the text.
"""

import ast
import bisect
import io
import itertools
import re
import tokenize
from collections.abc import Iterable
from typing import Any, NamedTuple

from bootfile.lint.sources import FUNCTIONS

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
_COMMENT = re.compile(r"[ \t\f]*(#[^\r\n]*)?")
_IMPORTS = (ast.Import, ast.ImportFrom)


class CannotEdit(Exception):
    """A change is not possible here. lines: the reasons, for the user."""

    def __init__(self, *lines: str):
        super().__init__("; ".join(lines))
        self.lines = [*lines]


def require(condition: Any, reason: str) -> None:
    """Raise CannotEdit with a reason if a condition is not met."""
    if not condition:
        raise CannotEdit(reason)


class Edit(NamedTuple):
    """One change. start, end: offsets of the text that is replaced."""

    start: int
    end: int
    text: str


class Script:
    """A file and the edits that are planned for it. Lines that are inserted are indented as their place; they
    have four spaces for each further level, and get the indentation and line ends of the file.

    All methods raise CannotEdit if an edit is not possible. Two edits cannot replace the same text; edits at
    one place keep the order in which they were planned; the same edit is planned once.
    """

    def __init__(self, path: str, data: bytes):
        self.path = path
        self.encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        self.text = data.decode(self.encoding)
        self.tree = ast.parse(data)
        self._lines = [match.group() for match in _LINE.finditer(self.text)]
        self._starts = [match.start() for match in _LINE.finditer(self.text)]
        try:
            tokens = [*tokenize.generate_tokens(iter(self._lines).__next__)]
        except (tokenize.TokenError, SyntaxError) as error:
            raise CannotEdit(f"{path} has tokens that are not read") from error
        # (start, end, text) of each token of the syntax
        self._tokens = [
            (
                self._starts[one.start[0] - 1] + one.start[1],
                self._starts[one.end[0] - 1] + one.end[1],
                one.string,
            )
            for one in tokens
            if one.type not in (tokenize.COMMENT, tokenize.NL) and one.string.strip()
        ]
        self._indent = next((one.string for one in tokens if one.type == tokenize.INDENT), "    ")
        self._newline = self._lines[0][len(self._lines[0].rstrip("\r\n")) :] or "\n"
        self._edits: list[Edit] = []

    def render(self) -> bytes:
        """Return the new content of the file. Raises CannotEdit if two edits replace the same text."""
        # what is inserted before a text comes before its replacement
        edits = sorted(self._edits, key=lambda edit: (edit.start, edit.end > edit.start))
        for one, other in itertools.pairwise(edits):
            require(other.start >= one.end, f"two repairs change line {self._line(other.start)}")
        parts, last = [], 0
        for edit in edits:
            parts += [self.text[last : edit.start], edit.text]
            last = edit.end
        return "".join([*parts, self.text[last:]]).encode(self.encoding)

    def _plan(self, start: int, end: int, text: str) -> None:
        if Edit(start, end, text) not in self._edits:
            self._edits.append(Edit(start, end, text))

    # Places

    def span(self, node: Any) -> tuple[int, int]:
        """Return the offsets of the start and the end of a node of `ast`, a function with its decorators."""
        decorators = getattr(node, "decorator_list", [])
        start = self._offset(node.lineno, node.col_offset)
        # the "@" stands before the expression of a decorator
        if decorators:
            start = self._starts[decorators[0].lineno - 1] + len(self._indent_of(decorators[0].lineno))
        return start, self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        # ast counts bytes of UTF-8
        return self._starts[line - 1] + len(self._lines[line - 1].encode("utf-8")[:column].decode("utf-8"))

    def source(self, node: Any) -> str:
        """Return the text of a node, as the file has it."""
        start, end = self.span(node)
        return self.text[start:end]

    def _line(self, offset: int) -> int:
        return bisect.bisect_right(self._starts, offset)

    def _indent_of(self, line: int) -> str:
        text = self._lines[line - 1]
        return text[: len(text) - len(text.lstrip(" \t\f"))]

    def _end_of_line(self, line: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].rstrip("\r\n"))

    def is_first(self, statement: ast.stmt) -> bool:
        """Return whether nothing stands before a statement in its line."""
        start, _ = self.span(statement)
        line = self._line(start)
        return start == self._starts[line - 1] + len(self._indent_of(line))

    def _is_last(self, offset: int) -> bool:
        """Return whether only a comment follows an offset in its line."""
        return _COMMENT.fullmatch(self.text, offset, self._end_of_line(self._line(offset))) is not None

    # Statements

    def insert_before(self, statement: ast.stmt, lines: Iterable[str]) -> None:
        """Insert lines before a statement, below its comments."""
        line = self._line(self.span(statement)[0])
        require(self.is_first(statement), f"line {line} has other statements, too")
        text = self._lay_out(lines, self._indent_of(line))
        self._plan(self._starts[line - 1], self._starts[line - 1], text)

    def insert_after(self, statement: ast.stmt, lines: Iterable[str]) -> None:
        """Insert lines after the last line of a statement, and of others in that line. Raises CannotEdit if
        they would come into the middle of another statement."""
        start, end = self.span(statement)
        line, last = self._line(start), self._line(end)
        # `first; statement`
        beside = [node for node in ast.walk(self.tree) if isinstance(node, ast.stmt) and node.lineno == line]
        first = min([statement, *beside], key=lambda node: node.col_offset)
        # `if test: statement`: the line after it is not in the block of the test
        is_in_suite = first is not statement and hasattr(first, "body")
        is_alone = self.is_first(first) and not is_in_suite and (self._is_last(end) or line == last)
        require(is_alone, f"line {line} has other statements, too")
        text = self._lay_out(lines, self._indent_of(line), is_after=True)
        self._plan(self._end_of_line(last), self._end_of_line(last), text)

    def insert_first(self, block: Any, lines: Iterable[str]) -> None:
        """Insert lines at the beginning of the body of a loop, function or test, below a docstring."""
        first = block.body[0]
        if isinstance(block, ast.FunctionDef) and ast.get_docstring(block, clean=False) is not None:
            self.insert_after(first, lines)
            return
        line = self._line(self.span(first)[0])
        require(self.is_first(first), f"line {line} has other statements, too")
        text = self._lay_out(lines, self._indent_of(line))
        place = self._above(line, ("", "#"))  # above the comments of the first statement
        self._plan(place, place, text)

    def guard(self, first: ast.stmt, last: ast.stmt, header: str) -> None:
        """Put statements of one block, from the first to the last, below a line such as `if rank == 0:`."""
        start, end = self.span(first)[0], self.span(last)[1]
        numbers = range(self._line(start), self._line(end) + 1)
        require(self._is_last(end), f"line {numbers[0]} has other statements, too")
        self.insert_before(first, [header])
        texts = [node for node in ast.walk(self.tree) if isinstance(node, ast.Constant | ast.JoinedStr)]
        # the further lines of a text begin with what is in it
        inside = {number for text in texts for number in range(text.lineno + 1, (text.end_lineno or 0) + 1)}
        for number in [number for number in numbers if number not in inside]:
            offset = self._starts[number - 1] + len(self._indent_of(number))
            if offset < self._end_of_line(number):
                self._plan(offset, offset, self._indent)

    def move(self, statement: ast.stmt, before: ast.stmt) -> None:
        """Move the lines of a statement before those of another one of its block, each with its comments."""
        start, end = self.span(statement)
        is_alone = self.is_first(statement) and self._is_last(end) and self.is_first(before)
        require(is_alone, f"line {self._line(start)} has other statements, too")
        first, place = (self._above(self._line(self.span(one)[0]), ("#",)) for one in (statement, before))
        last = [*self._starts, len(self.text)][self._line(end)]  # the start of the next line
        self._plan(first, last, "")
        self._plan(place, place, self.text[first:last].rstrip("\r\n") + self._newline)

    def _above(self, line: int, marks: tuple[str, ...]) -> int:
        """Return the offset of the lines right above a line that begin with a mark."""
        while self._lines[line - 2].strip()[:1] in marks:
            line -= 1
        return self._starts[line - 1]

    def _lay_out(self, lines: Iterable[str], indent: str, is_after: bool = False) -> str:
        text = ""
        for line in lines:
            bare = line.lstrip(" ")
            levels = (len(line) - len(bare)) // 4
            whole = indent + self._indent * levels + bare if bare else ""
            text += self._newline + whole if is_after else whole + self._newline
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

    def add_entry(self, node: ast.Dict | ast.Call, key: str, value: str) -> None:
        """Add an entry at the end of a dict display, in the quotes of its first key, or of `dict()`."""
        if isinstance(node, ast.Call):
            self.add_argument(node, f"{key}={value}")
            return
        quote = "'" if node.keys and node.keys[0] and self.source(node.keys[0])[0] == "'" else '"'
        start, end = self.span(node)
        parts = [one or other for one, other in zip(node.keys, node.values, strict=True)]
        self._add(start, end - 1, f"{quote}{key}{quote}: {value}", parts)

    def add_argument(self, node: ast.Call, text: str) -> None:
        """Add an argument at the end of a call, such as `key=len`."""
        after = self.span(node.func)[1]
        opening = next((start for start, _, token in self._tokens if start >= after and token == "("), 0)
        given: list[Any] = [*node.args, *node.keywords]
        parts = sorted(given, key=lambda part: (part.lineno, part.col_offset))
        self._add(opening, self.span(node)[1] - 1, text, parts)

    def add_parameter(self, node: Any, text: str) -> None:
        """Add a parameter at the end of those of a function, such as `scheduler=None`."""
        given = node.args
        has_others = given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs
        reason = f"{node.name}() has no list of parameters that can be extended"
        require(given.args and not has_others, reason)
        place = self._offset(node.lineno, node.col_offset)
        opening = next(start for start, _, token in self._tokens if start >= place and token == "(")
        depth, closing = 1, opening
        for start, _, token in self._tokens:
            if start > opening and depth:
                depth, closing = depth + (token in "([{") - (token in ")]}"), start
        self._add(opening, closing, text, [])

    def _add(self, opening: int, closing: int, text: str, parts: list[Any]) -> None:
        """Add a part between two brackets. parts: those that may be in lines of their own."""
        is_found = any(token[0] == closing for token in self._tokens)
        require(is_found, f"line {self._line(closing)} has a form that is not edited")
        inside = [token for token in self._tokens if opening < token[0] < closing]
        if not inside:
            self._plan(closing, closing, text)
            return
        has_comma = inside[-1][2] == ","
        end, after = inside[-1 - has_comma][1], inside[-1][1]
        # one part in each line, and the bracket in the next one
        if parts and self._is_last(after) and (len(parts) == 1 or parts[0].lineno != parts[-1].lineno):
            if not has_comma:
                self._plan(end, end, ",")
            place = self._end_of_line(self._line(end))
            self._plan(place, place, f"{self._newline}{self._indent_of(parts[-1].lineno)}{text},")
        elif has_comma:
            self._plan(after, after, f" {text},")
        else:
            self._plan(end, end, f", {text}")

    # Names

    def find_bound(self) -> set[str]:
        """Return all names that the file binds anywhere, but for `import name` at its top."""
        names = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                names.add(node.name)
            # within a function the name is a local one, which may not be bound yet
            elif isinstance(node, ast.ImportFrom) or (
                isinstance(node, ast.Import) and node not in self.tree.body
            ):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        return names

    def claim(self, *names: str) -> None:
        """Raise CannotEdit if the file binds one of the names that a repair needs."""
        taken = ", ".join(sorted({*names} & self.find_bound()))
        require(not taken, f"{self.path}: {taken} has another meaning here")

    def imported(self, module: str) -> str:
        """Return the name that the top of the file gives to a module; "" if it does not import it, or if the
        name has another meaning anywhere in the file."""
        for node in self.tree.body:
            for alias in node.names if isinstance(node, ast.Import) else []:
                is_named = alias.name == module and (alias.asname or "." not in module)
                if is_named and (alias.asname or module) not in self.find_bound():
                    return alias.asname or module
        return ""

    def add_import(self, module: str) -> str:
        """Import a module once at the top of the file, and return its name there. Raises CannotEdit if the
        name means something else in the file."""
        if name := self.imported(module):
            return name
        self.claim(module)
        body, line = self.tree.body, [f"import {module}"]
        imports = [node for node in body if isinstance(node, _IMPORTS)]
        others = [node for node in imports if getattr(node, "module", "") != "__future__"]
        plain = [node for node in imports if isinstance(node, ast.Import) and node.names[0].name < module]
        is_described = ast.get_docstring(self.tree, clean=False) is not None
        # with the imports of the same form, in the order of their names
        if plain:
            self.insert_after(plain[-1], line)
        elif others or not (imports or is_described):
            self.insert_before((others or body)[0], line)
        else:
            self.insert_after((imports or body[:1])[-1], line)
        return module
