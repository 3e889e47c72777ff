"""Steps as a text: "400-420" or "7,400-420"."""

import re
from collections.abc import Iterable

from bootfile.ground.errors import BadInput

_RANGE = re.compile(r"([1-9]\d{0,14})(?:-([1-9]\d{0,14}))?")
_MOST = 10**6  # steps


def parse(option: str, text: str) -> frozenset[int]:
    """Return the steps in the value of an option. Raises BadInput."""
    steps: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else 0
        if not first or last < first or last - first >= _MOST:
            raise BadInput(f"{option} {text}: expected steps such as 400-420 or 7,400-420, counted from 1")
        steps.update(range(first, last + 1))
    return frozenset(steps)


def describe(steps: Iterable[int]) -> str:
    """Return steps as a text that parse() reads; "" without steps."""
    ordered = sorted(steps)
    parts = []
    place = 0
    while place < len(ordered):
        end = place
        while end + 1 < len(ordered) and ordered[end + 1] == ordered[end] + 1:
            end += 1
        text = str(ordered[place])
        if end > place:
            text += f"-{ordered[end]}"
        parts.append(text)
        place = end + 1
    return ",".join(parts)
