"""Remove the marked blocks of a variant of a job, and check that the rest is its base.

    python -m tests.support.marks jobs/train_ddp.py           print the file without its blocks
    python -m tests.support.marks --diff jobs/train_ddp.py    print what the blocks add, as in the README

A block opens with `### tag k/n, reason ###` and closes with the same line. The blank line before it
belongs to it; the first block of a suite has none. A line `# - code` in a block is a line of the base that
the block replaces; `# -` alone is a blank line of the base. train_exact.py has the blocks of its base,
train_ddp.py, and some of its own are inside them: the marks of another tag are lines of the base.
"""

import difflib
import re
import sys
from pathlib import Path

from launch.new.cli import MarksError, replaced_lines, without_docstring

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTED, NEW = "分布式改造 (distributed)", "新增 (new)"
_BASES = dict.fromkeys(("train_exact", "train_fsdp"), "train_ddp.py")  # the names do not tell it
_MARK = re.compile(r"( *)### (?P<tag>.+) (?P<k>\d+)/(?P<n>\d+), \S.* ###")


def base_of(path: Path) -> Path | None:
    """Return the base of a variant in the same folder: train_ddp.py -> train.py (longest prefix)."""
    if path.stem in _BASES:
        return path.with_name(_BASES[path.stem])
    name = path.stem
    while "_" in name:
        name = name.rpartition("_")[0]
        if (base := path.with_name(f"{name}.py")).exists():
            return base
    return None


def tag_of(path: Path) -> str:
    return DISTRIBUTED if path.stem.endswith("_ddp") else NEW


def strip(text: str, tag: str) -> str:
    """Return the text without its blocks. Raises MarksError."""
    kept, opening, blocks, inside = [], None, [], 0
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        match = _MARK.fullmatch(line)
        is_of_base = "###" not in line or (match and match["tag"] == DISTRIBUTED != tag)
        if opening is None and is_of_base:
            kept.append(line)
        elif opening is None:
            if not match or match["tag"] != tag:
                raise MarksError(f"line {number}: not a mark of the form `### {tag} k/n, reason ###`: {line}")
            if kept and not kept[-1].strip():
                kept.pop()
            elif not kept or len(match[1]) <= len(kept[-1]) - len(kept[-1].lstrip()):  # first in its suite
                raise MarksError(f"line {number}: no blank line before the block")
            opening, inside = line, 0
            blocks.append((number, int(match["k"]), int(match["n"])))
        elif "###" in line:
            if line != opening:
                raise MarksError(
                    f"line {number}: the block closes with another line than it opened with: {line}"
                )
            if not inside:
                raise MarksError(f"line {number}: the block is empty")
            opening = None
        else:
            inside += 1
            kept += replaced_lines(line)
    if opening is not None:
        raise MarksError(f"line {blocks[-1][0]}: the block is never closed")
    for position, (number, k, n) in enumerate(blocks, start=1):
        if (k, n) != (position, len(blocks)):
            raise MarksError(f"line {number}: numbered {k}/{n}, it is {position}/{len(blocks)}")
    if not blocks:
        raise MarksError("no blocks")
    return "\n".join(kept)


def find_marks(text: str) -> list[int]:
    """Return the numbers of the lines with marks of the variant's own blocks, from 0."""
    marks = [(number, line) for number, line in enumerate(text.split("\n")) if "###" in line]
    has_new = any(NEW in line for _, line in marks)
    return [number for number, line in marks if NEW in line or not has_new]


def without_block(text: str, k: int) -> str:
    """Return the text without its k-th block, with the lines that the block replaced. This measures its gain.
    The other blocks keep their numbers. Raises MarksError."""
    lines, places = text.split("\n"), find_marks(text)
    if not 0 < 2 * k <= len(places):
        raise MarksError(f"there are {len(places) // 2} blocks, no block {k}")
    first, last = places[2 * k - 2], places[2 * k - 1]
    begin = first if lines[first - 1].strip() else first - 1  # with the blank line before it
    replaced = [each for line in lines[first + 1 : last] for each in replaced_lines(line)]
    return "\n".join(lines[:begin] + replaced + lines[last + 1 :])


def check(variant: str, base: str, tag: str) -> None:
    """Raise MarksError unless the variant without its blocks is the base (docstrings are not compared)."""
    stripped, expected = without_docstring(strip(variant, tag)), without_docstring(base)
    if stripped != expected:
        before, after = expected.split("\n"), stripped.split("\n")
        difference = difflib.unified_diff(before, after, "base", "stripped", n=0, lineterm="")
        raise MarksError("\n".join(difference))


def diff(variant: str, base: str) -> str:
    """Return a unified diff of the two bodies with one line of context, without line numbers."""
    before, after = without_docstring(base).split("\n"), without_docstring(variant).split("\n")
    lines = list(difflib.unified_diff(before, after, n=1, lineterm=""))[2:]
    return "\n".join("@@" if line.startswith("@@") else line.rstrip() for line in lines)


def main(arguments: list[str]) -> None:
    path = Path(arguments[-1])
    text = path.read_text(encoding="utf-8")
    if arguments[0] == "--diff":
        print(diff(text, base_of(path).read_text(encoding="utf-8")))
    else:
        sys.stdout.write(strip(text, tag_of(path)))


if __name__ == "__main__":
    main(sys.argv[1:])
