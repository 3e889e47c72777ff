"""Describe the data sets on a server as text."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from common.ground.exits import BadInput

Read = Callable[[np.ndarray], list]  # ids -> samples, or MISSING, or DAMAGED


class DataSet(NamedTuple):
    """A data set in a form.

    name: the argument of rm
    samples: number of samples in the data set
    there: number of stored samples; None if they were not counted
    bytes: size of the stored samples
    mode: "active" or "offline"
    users: the processes that use it, each in words
    counts: hits, misses, bad, errors and put since the data set was created
    """

    name: str
    title: str
    form: str
    samples: int
    there: int | None
    bytes: int | None
    mode: str
    users: list[str]
    counts: dict[str, int]

    @property
    def hit_rate(self) -> float | None:
        asked = sum(self.counts.get(name, 0) for name in ("hits", "misses", "bad", "errors"))
        return self.counts.get("hits", 0) / asked if asked else None


def choose(sets: list[DataSet], text: str) -> DataSet:
    """Return the data set whose name begins with `text`. Raises BadInput if none or several
    do."""
    found = [each for each in sets if each.name == text] or [
        each for each in sets if text and each.name.startswith(text)
    ]
    if len(found) != 1:
        shown = ", ".join(each.name for each in found or sets) or "nothing"
        raise BadInput(f"{text!r} matches {len(found)} data sets; stored: {shown}")
    return found[0]


def describe(sets: list[DataSet]) -> str:
    """Return a table with one line for each data set, and a line for each user."""
    rows = [("name", "data set", "form", "samples", "GB", "mode", "hits", "users")]
    for each in sets:
        there = f"{each.there}/{each.samples}"
        size = f"{(each.bytes or 0) / 1e9:.3f}"
        hits = "-" if each.hit_rate is None else f"{each.hit_rate:.1%}"
        rows.append((each.name, each.title, each.form, there, size, each.mode, hits, str(len(each.users))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [f"{each.name} is used by {user}" for each in sets for user in each.users]
    return "\n".join(lines)
