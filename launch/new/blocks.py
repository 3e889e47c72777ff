"""Combine the comment blocks of several variants of a job into one job.

A block opens with `### tag k/n, reason ###` and closes with the same line. It includes the blank line before
it. A line `# - code` in a block is a line of the base that the block replaces; `# -` alone is a blank line of
the base.
"""

import ast
import re
from collections import Counter

_NUMBER = re.compile(r"( *### .+? )(\d+)/(\d+)(, .* ###)")


class MarksError(Exception):
    """A malformed block. The message names the line."""


def replaced_lines(line: str) -> list[str]:
    """Return the line of the base that a line `# - code` of a block replaces; [] for other lines."""
    indent, sign, code = line.partition("# - ")
    if sign and not indent.strip():
        return [indent + code]
    return [""] if line.strip() == "# -" else []


def without_docstring(text: str) -> str:
    """Return the text after its module docstring. Raises MarksError."""
    try:
        docstring = ast.parse(text).body[0]
    except SyntaxError as error:
        raise MarksError(f"line {error.lineno}: {error.msg}") from error
    if not (isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)):
        raise MarksError("no module docstring")
    return "\n".join(text.split("\n")[docstring.end_lineno :])


def combine(base: str, *variants: str, tag: str = "") -> str:
    """Return the base with the blocks of several variants, each at its place. Blocks at the same place have
    the order of the variants. tag: only blocks with this tag count; the base may have others. Raises
    MarksError."""
    docstring, lines = base.removesuffix(without_docstring(base)), without_docstring(base).split("\n")
    inserted: dict[int, list[str]] = {}  # the lines of the base before it -> blocks
    dropped: set[int] = set()  # lines of the base that blocks replace
    for variant in variants:
        kept, place, opening = 0, 0, None
        text = without_docstring(variant).split("\n")
        for line, following in zip(text, [*text[1:], ""], strict=True):
            is_mark, is_next = (f"### {tag}" in each for each in (line, following))
            if opening is None and not is_mark and (line.strip() or not is_next):
                if kept == len(lines) or line != lines[kept]:
                    raise MarksError(f"not a line of the base: {line}")
                kept += 1
                continue
            if is_mark:
                opening, place = (None, place) if opening else (line, kept)
            replaced = replaced_lines(line) if opening else []
            if replaced != lines[kept : kept + len(replaced)]:
                raise MarksError(f"not a line of the base: {line}")
            if replaced and kept in dropped:
                raise MarksError(f"two variants replace this line: {lines[kept]}")
            dropped |= set(range(kept, kept + len(replaced)))
            kept += len(replaced)
            inserted.setdefault(place if opening or is_mark else kept, []).append(line)
        if kept != len(lines):
            raise MarksError(f"{len(lines) - kept} lines of the base are missing")
    parts = [
        inserted.get(place, []) + ([] if place in dropped else lines[place : place + 1])
        for place in range(len(lines) + 1)
    ]
    return docstring + "\n".join(line for part in parts for line in part)


def without_replaced(text: str) -> str:
    """Return the text without the lines that its blocks replace."""
    kept, inside = [], False
    for line in text.split("\n"):
        inside ^= "###" in line
        if not (inside and replaced_lines(line)):
            kept.append(line)
    return "\n".join(kept)


def renumber(text: str) -> str:
    """Return the text with the blocks of each tag numbered from 1, in the order of the lines."""
    lines = text.split("\n")
    totals = Counter(match[1].strip() for line in lines if (match := _NUMBER.fullmatch(line)))
    seen = Counter[str]()
    for number, line in enumerate(lines):
        if match := _NUMBER.fullmatch(line):
            tag = match[1].strip()
            seen[tag] += 1  # each block has two marks
            lines[number] = f"{match[1]}{(seen[tag] + 1) // 2}/{totals[tag] // 2}{match[4]}"
    return "\n".join(lines)
