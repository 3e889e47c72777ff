"""The log of one node, put together from what the service lets one see of it: its last bytes.

Every answer is a window on a growing log: the last `current_size` of its `full_size` bytes, as text. What was
printed is kept as a byte of the whole log, and the text before it, so that reading goes on after an
interruption with nothing twice and nothing left out. Only whole lines are taken, so that a character which
the window cuts in half is never one of ours.
"""

import re
from typing import NamedTuple

from launch.platforms.service import Preview

_CUT = "\N{REPLACEMENT CHARACTER}"  # what stands for half a character in JSON
_KEPT = 400  # characters: enough to find the place again


class Place(NamedTuple):
    """What was read: `offset` bytes, which end with the text `tail`."""

    offset: int = 0
    tail: str = ""


def lines_after(place: Place, preview: Preview, last: bool = False) -> tuple[list[str], Place]:
    """The lines that came since, and the new place. last: the log has ended, so a line without an end counts,
    too. A line in brackets says what cannot be shown."""
    begin = preview.full_size - preview.current_size  # of the window
    data = _bytes(preview)
    lines: list[str] = []
    if preview.full_size < place.offset or (begin == 0 and place.tail and not _ends_of(place.tail, data)):
        lines.append("[the log begins anew]")
        place = Place()
    if place.offset >= begin:
        at = _index(place, data, place.offset - begin)
    else:  # the window's first line is not whole
        at = data.find(b"\n") + 1
        if at == 0 and not last:
            return [], place
        missing = begin + at - place.offset
        lines.append(f"[{missing} bytes are missing here: the service shows the end of a log only]")
    taken, newline, rest = data[at:].rpartition(b"\n")
    text = (taken + newline).decode(errors="ignore")
    end = rest.decode(errors="ignore") if last else ""
    text += f"{end}\n" if end else ""
    lines += [line.rstrip("\r") for line in text.split("\n")[:-1]]
    offset = preview.full_size - (0 if last else len(rest))
    return lines, Place(offset, (place.tail + text)[-_KEPT:] if not end else text[:-1][-_KEPT:])


def _bytes(preview: Preview) -> bytes:
    """The window as it is in the log, but for half characters at its ends: other bytes stand for them. Where
    bytes that are no text stand inside, they were replaced by more, and it is longer."""
    text, size = preview.content, preview.current_size
    inner = text.strip(_CUT).encode()
    around = size - len(inner)
    if len(text.encode()) == size or inner == text.encode() or around < 0:
        return text.encode()
    before, after = (len(text) - len(text.lstrip(_CUT)), len(text) - len(text.rstrip(_CUT)))
    before = min(before, around) if after else around  # one for each byte, as Go writes JSON
    return b"\x80" * before + inner + b"\x80" * (around - before)


def _index(place: Place, data: bytes, expected: int) -> int:
    """Where in the window the text begins that was not read. Where counting does not lead to the text that
    was read last, that is searched."""
    read, tail = data[:expected], place.tail.encode()
    if tail.endswith(read) if len(read) < len(tail) else read.endswith(tail):
        return expected
    ends = _ends_of(place.tail, data) or _ends_of("\n", data)
    return min(ends, key=lambda end: abs(end - expected), default=len(data))


def _ends_of(text: str, data: bytes) -> list[int]:
    return [found.end() for found in re.finditer(re.escape(text.encode()), data)]
