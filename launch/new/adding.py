"""Add the blocks of train_ddp.py to a job that its user has edited: `launch new --add ddp` calls it.

Each block goes where it is in Bootfile's own job: after the line before it, or before the line after it. All
lines of the user stay as they are.
"""

import re
from typing import NamedTuple

from bootfile.ground.errors import BadInput
from launch.new import blocks

_TAG = "分布式改造"  # of the blocks of train_ddp.py


class _Block(NamedTuple):
    """A block, and its place in Bootfile's job.

    text: its lines, perhaps with a blank one before them. mark: its first line. before, after: the lines next
    to it in the job that are not blank, with their indentation.
    """

    text: str
    mark: str
    before: str
    after: str


def add(text: str, base: str, variant: str, name: str) -> tuple[str, int]:
    """Return (the job with the blocks that it does not have yet, how many they are).

    text: the user's job. base: the job as `launch new` wrote it. variant: the same with the blocks. name: the
    job in messages. Blocks that the user has pasted stay where they are.

    Raises BadInput if the lines next to a block were changed or removed. Before, it prints the block.
    """
    docstring = _get_docstring(base)
    if text.startswith(docstring):  # it names the blocks; one of the user's own stays
        text = _get_docstring(variant) + text.removeprefix(docstring)
    lines = text.splitlines(True)
    count = 0
    for block in _list_blocks(variant):
        if text.count(block.mark.strip()) == 2:
            continue
        place = _find_place(lines, block)
        if place is None:
            print(block.text.strip("\n"))
            raise BadInput(
                f"{name} has no place for the block above: it belongs between the lines "
                f"`{block.before.strip()}` and `{block.after.strip()}` of Bootfile's job; paste it, and run "
                "this command again for the others"
            )
        lines[place:place] = block.text.splitlines(True)
        count += 1
    return "".join(lines), count


def _get_docstring(job: str) -> str:
    """Return the beginning of a job, up to the end of its docstring."""
    return job.removesuffix(blocks.without_docstring(job))


def _list_blocks(variant: str) -> list[_Block]:
    """Return the blocks of train_ddp.py in a job, in the order of the lines."""
    pattern = re.compile(blocks.BLOCK.pattern.replace("### ", f"### {_TAG}", 1), re.MULTILINE)
    rest = blocks.without_docstring(variant)
    matches = list(pattern.finditer(rest))
    listed = []
    for match in matches:
        # what follows may be another block, without which the user's job may be
        before = pattern.sub("", rest[: match.start()]).rstrip().split("\n")[-1]
        after = pattern.sub("", rest[match.end() :]).lstrip("\n").split("\n")[0]
        listed.append(_Block(match[0], match[1].rstrip("\n"), before, after))
    return listed


def _find_place(lines: list[str], block: _Block) -> int | None:
    """Return the number of lines of the user's job before a block; None if it has no place.

    Both lines next to it are the best proof. If the user has changed one of them, or put others between them,
    one that is there once is enough.
    """
    befores = []
    afters = []
    both = []
    for number, line in enumerate(lines):
        code = line.rstrip("\n")
        if code == block.before:
            befores.append(number)
            following = "".join(lines[number + 1 :]).lstrip("\n").split("\n")[0]
            if following == block.after:
                both.append(number + 1)
        if code == block.after:
            afters.append(number)
    if len(both) == 1:
        return both[0]
    # The mark of a block of the user is there twice: a place after it is after the second one.
    if block.before.strip().startswith("### ") and len(befores) == 2:
        return befores[1] + 1
    if len(befores) == 1:
        return befores[0] + 1
    is_mark = block.after.strip().startswith("### ")
    if len(afters) == 1 or (is_mark and len(afters) == 2):
        place = afters[0]
        while place and not lines[place - 1].strip():  # the block begins with a blank line
            place -= 1
        return place
    return None
