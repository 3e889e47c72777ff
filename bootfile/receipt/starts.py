"""Read how a run was started: starts.jsonl in its output folder has one line for each start.

common/run/starts.py describes the lines and writes them. A loop of your own has no such file.
"""

import contextlib
import os
from typing import Any

from bootfile.ground.files import read_json_lines

FILE = "starts.jsonl"  # in a run's output folder
_MOST = 2**26  # bytes of FILE
_OBJECTS = ("settings", "environment")


def read(folder: str, whole: bool = False) -> list[dict[str, Any]]:
    """Return the starts of the run in a folder, in order, without damaged lines. whole: raise BadInput if
    lines are damaged."""
    with contextlib.suppress(OSError):
        return keep_complete(read_json_lines(os.path.join(folder, FILE), _MOST, whole))
    return []


def keep_complete(starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the starts that have settings and an environment."""
    return [start for start in starts if all(isinstance(start.get(name), dict) for name in _OBJECTS)]
