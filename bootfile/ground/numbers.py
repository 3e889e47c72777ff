"""Numbers in text and in variables, and parts of numbers."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def parse_number(text: str, kind: Callable[[str], Any] = int) -> Any:
    """Return a number of this kind, int or float. Raises ValueError, also for 1_0 and the digits of other
    scripts, which int() and float() accept."""
    if not text.isascii() or "_" in text:
        raise ValueError(f"{text!r} is not a number")
    return kind(text)


def counted(count: int, name: str) -> str:
    """Return a number of things in words: "1 step", "2 steps"."""
    return f"1 {name}" if count == 1 else f"{count} {name}s"


def find_ranges(numbers: Iterable[int]) -> list[str]:
    """Return ascending numbers as ranges: "3-5", "9"."""
    # the distance of a number from its place is the same in a range
    groups = itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0])
    ranges = [[number for _, number in group] for _, group in groups]
    return [f"{first}-{rest[-1]}" if rest else str(first) for first, *rest in ranges]


def count_in(env: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable; None if it is a word, is not above 0, or is not set."""
    with contextlib.suppress(ValueError):
        return max(0, parse_number(env.get(name, ""))) or None
    return None


def part_of(count: int, rank: int, world_size: int) -> range:
    """Return the part of a rank of 0..count-1: neighbours, of two ranks equally many or one more."""
    return range(count * rank // world_size, count * (rank + 1) // world_size)
