"""What the verbs tell and ask the user: times and sizes in words, tables, and a question."""

import datetime
import sys
from collections.abc import Iterable, Sequence

from bootfile.ground.errors import BadInput


def format_time(seconds: float) -> str:
    """Return a time since 1970 as "2026-11-20 22:01:09 UTC", or "–" for a time outside the calendar."""
    try:
        return f"{datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "–"


def human_size(size: float) -> str:
    """Return a number of bytes in powers of 1000: "1.23MB"."""
    from tqdm import tqdm  # which not every verb needs

    return tqdm.format_sizeof(size, "B")


def align(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines with aligned columns."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def ask(question: str, yes: bool) -> bool:
    """Return whether the user answers yes; an empty answer counts as no. If `yes` is set, return True without
    asking. Raises BadInput if there is no terminal."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise BadInput(f"cannot ask without a terminal: pass --yes to {question}")
    print(f"{question}? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
