"""Describe the data sets in a cache, of packs or of servers, as text and as JSON."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np

from common.exits import BadInput
from datasets.folders.image_folder import ImageFolderIndex

Read = Callable[[np.ndarray], list]  # ids -> samples, as Place.reader() describes them


class DataSet(NamedTuple):
    """A data set in a form.

    name: the argument of rm
    samples: number of samples in the data set
    there: number of stored samples; None if they were not counted
    bytes: size of the stored samples
    mode: "active" or "offline"; of a pack also "unfinished" or "damaged"
    users: (name, seconds until the lease ends; None for a pack)
    counts: hits, misses, bad, errors and put since the data set was created; {} for a pack
    """

    name: str
    fingerprint: str
    title: str
    form: str
    samples: int
    there: int | None
    bytes: int | None
    mode: str
    users: Sequence[tuple[str, float | None]]
    counts: dict[str, int]

    @property
    def hit_rate(self) -> float | None:
        asked = sum(self.counts.get(name, 0) for name in ("hits", "misses", "bad", "errors"))
        return self.counts.get("hits", 0) / asked if asked else None


class Room(NamedTuple):
    """The space of a server or a disk, in bytes. limit: None if there is no limit. note: a remark."""

    name: str
    used: int
    limit: int | None
    note: str


class Place(Protocol):
    """A cache: the packs in a folder (pack.py) or the servers of a URL (redis.py).

    shared: whether nodes share it, so that each can fill a part. form: the default. forms: those that it
    holds.
    """

    shared: bool
    form: str
    forms: tuple[str, ...]

    def close(self) -> None: ...

    def preload(
        self, index: ImageFolderIndex, form: str, short_side: int, workers: int, ids: np.ndarray
    ) -> int: ...

    def reader(self, index: ImageFolderIndex, form: str, short_side: int) -> AbstractContextManager[Read]: ...

    def sets(self, counted: bool = True) -> list[DataSet]: ...

    def remove(self, each: DataSet) -> None: ...

    def rooms(self) -> list[Room]: ...


def choose(sets: list[DataSet], text: str) -> DataSet:
    """Return the data set whose name or fingerprint begins with `text`. Raises BadInput if none or several
    do."""
    found = [each for each in sets if each.name == text] or [
        each for each in sets if text and (each.name.startswith(text) or each.fingerprint.startswith(text))
    ]
    if len(found) != 1:
        shown = ", ".join(each.name for each in found or sets) or "nothing"
        raise BadInput(f"{text!r} matches {len(found)} data sets; stored: {shown}")
    return found[0]


def describe_user(who: str, left: float | None) -> str:
    return who if left is None else f"{who} (lease ends in {left:.0f} s)"


def format_table(sets: list[DataSet]) -> str:
    """Return a table with one line for each data set."""
    rows = [("name", "data set", "form", "samples", "GB", "mode", "users")]
    for each in sets:
        there = f"{each.there}/{each.samples}"
        size = f"{(each.bytes or 0) / 1e9:.3f}"
        rows.append((each.name, each.title, each.form, there, size, each.mode, str(len(each.users))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def format_details(sets: list[DataSet], rooms: list[Room]) -> str:
    """Return some lines for each data set, and one for each server or disk."""
    lines = []
    for each in sets:
        lines.append(f"{each.name}  {each.title}")
        size = f"{(each.bytes or 0) / 1e9:.3f} GB"
        lines.append(f"  {each.there} of {each.samples} samples, {size}, {each.form}, {each.mode}")
        if each.counts:
            rate = "no reads yet" if each.hit_rate is None else f"hit rate {each.hit_rate:.1%}"
            counts = ", ".join(f"{name} {number}" for name, number in sorted(each.counts.items()))
            lines.append(f"  {rate} ({counts})")
        lines += [f"  used by {describe_user(who, left)}" for who, left in each.users]
    for room in rooms:
        limit = "no limit" if room.limit is None else f"{room.limit / 1e9:.3f} GB"
        lines.append(f"{room.name}: {room.used / 1e9:.3f} GB used of {limit}{room.note and ', '}{room.note}")
    return "\n".join(lines)


def to_json(sets: list[DataSet], rooms: list[Room] | None = None) -> str:
    found = {"sets": [each._asdict() | {"hit_rate": each.hit_rate} for each in sets]}
    if rooms is not None:
        found["room"] = [room._asdict() for room in rooms]
    return json.dumps(found, indent=2)
