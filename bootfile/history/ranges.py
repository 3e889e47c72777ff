"""Steps as a text: "400-420" or "7,400-420"."""

import re
from collections.abc import Iterable

from bootfile.ground.errors import BadInput
from bootfile.receipt.steps import find_ranges

_RANGE = re.compile(r"([1-9]\d{0,14})(?:-([1-9]\d{0,14}))?")
_MOST = 10**6  # steps


def parse(option: str, text: str) -> frozenset[int]:
    """Return the steps in the value of an option. Raises BadInput."""
    steps: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        chosen = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not 0 < len(chosen) <= _MOST:
            raise BadInput(f"{option} {text}: expected steps such as 400-420 or 7,400-420, counted from 1")
        steps.update(chosen)
    return frozenset(steps)


def describe(steps: Iterable[int]) -> str:
    """Return steps as a text that parse() reads; "" without steps."""
    return ",".join(find_ranges(sorted(steps)))
