"""Combine the comment blocks of several variants of a job into one job. `launch new` and tests use it.

A block opens with `### tag k/n, reason ###` and closes with the same line. It includes the blank line before
it. A line `# - code` in a block is a line of the base that the block replaces; `# -` alone is a blank line of
the base.
"""

import ast
import re
from collections import Counter
from difflib import unified_diff

BLOCK = re.compile(r"(?:^\n)?^( *### .+ ###\n)(?:.*\n)*?\1", re.MULTILINE)
_NUMBER = re.compile(r"^( *### .+? )(\d+)/(\d+)(, .* ###)$", re.MULTILINE)


class MarksError(Exception):
    """A malformed block. The message names the line."""


def replaced_lines(line: str) -> list[str]:
    """Return the line of the base that a line `# - code` of a block replaces; [] for other lines."""
    indent, sign, code = line.partition("# - ")
    if sign and not indent.strip():
        return [indent + code]
    if line.strip() == "# -":
        return [""]
    return []


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
    of_tag = re.compile(BLOCK.pattern.replace("### ", f"### {tag}", 1), re.MULTILINE)
    body = without_docstring(base)
    docstring = base.removesuffix(body)
    lines = body.splitlines(True)
    inserted: dict[int, str] = {}  # the number of lines of the base before it -> blocks
    dropped: set[int] = set()  # lines of the base that blocks replace
    for variant in variants:
        text = without_docstring(variant)
        end = 0  # of the block before
        kept: list[str] = []  # the lines of the base, as the variant has them
        for block in of_tag.finditer(text):
            kept += text[end : block.start()].splitlines(True)
            inserted[len(kept)] = inserted.get(len(kept), "") + block[0]
            # a block may replace lines of the base: they are comments in it
            for line in block[0].split("\n"):
                for replaced in replaced_lines(line):
                    if len(kept) in dropped:
                        raise MarksError(f"two variants replace this line: {replaced}")
                    dropped.add(len(kept))
                    kept.append(f"{replaced}\n")
            end = block.end()
        kept += text[end:].splitlines(True)
        # what is not in a block must be the base: each variant stands for it without its blocks
        if kept != lines:
            raise MarksError(f"not the lines of the base: {[*unified_diff(lines, kept, n=0)][3]!r}")
    parts = [docstring]
    for place, line in enumerate([*lines, ""]):  # "": blocks may follow the last line
        parts.append(inserted.get(place, ""))
        if place not in dropped:
            parts.append(line)
    return "".join(parts)


def without_replaced(text: str) -> str:
    """Return the text without the lines that its blocks replace."""

    def shorten(block: re.Match) -> str:
        """Return a block without the lines that it replaces: re.sub() calls it for each block."""
        return "\n".join(line for line in block[0].split("\n") if not replaced_lines(line))

    return BLOCK.sub(shorten, text)


def renumber(text: str) -> str:
    """Return the text with the blocks of each tag numbered from 1, in the order of the lines."""
    totals = Counter(match[1].strip() for match in _NUMBER.finditer(text))  # tag -> marks
    seen = Counter[str]()

    def number(match: re.Match) -> str:
        """Return a mark with its number: re.sub() calls it for each mark, in the order of the lines."""
        tag = match[1].strip()
        seen[tag] += 1  # each block has two marks
        return f"{match[1]}{(seen[tag] + 1) // 2}/{totals[tag] // 2}{match[4]}"

    return _NUMBER.sub(number, text)
