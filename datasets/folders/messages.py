"""What a scan of a folder prints: lines, the begin of long lists, and a progress bar."""

import os
from collections.abc import Callable, Sequence

from tqdm import tqdm

Log = Callable[[str], object]  # called with one line of text
SHOWN = 10  # entries of a long list in a message


def shown(texts: Sequence[str]) -> str:
    """Return the first texts of a long list, and the number of the others."""
    text = "; ".join(texts[:SHOWN])
    if len(texts) > SHOWN:
        text += f"; and {len(texts) - SHOWN} more"
    return text


def progress(total: int | None, text: str, done: int = 0, unit: str = "image") -> tqdm:
    """Return a progress bar that counts images. done: those that were ready before."""
    # not a terminal: print every 10 s, so that a long scan does not look like a hang
    seconds = 0.1 if os.isatty(2) else 10
    return tqdm(total=total, initial=done, desc=text, unit=unit, delay=2, mininterval=seconds)
