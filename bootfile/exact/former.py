"""States of versions 0.47 to 0.51, continued as those of today: fields that they lack, and their checksum.

A later version deletes this file as a whole.
"""

from typing import Any, BinaryIO

import numpy as np

from bootfile.exact.digest import add_bytes
from bootfile.exact.files import Refused
from bootfile.exact.state import FORMAT

_FORMER = 2
_PIECE = 2**20  # bytes that are read and added at a time


def upgrade(state: Any) -> None:
    """Give a state of format 2 the fields that it lacks. Raises Refused for one before version 0.47."""
    if state.get("format") != _FORMER:
        return
    if "code" not in state:
        raise Refused(
            "version 0.46 or an earlier one wrote it: version 0.50.0 (commit b13c3a6c) reads it, and its "
            "next checkpoint can be continued here"
        )
    state["format"] = FORMAT
    state.setdefault("attributes", {})  # version 0.50 was the first that wrote it
    state.setdefault("epoch_ended", False)  # only a state at the end of the code of an epoch had it


def sum_bytes(file: BinaryIO) -> str:
    """Return the checksum of a file as version 0.51 and earlier recorded it. Raises OSError."""
    added, place = 0, 0
    while piece := file.read(_PIECE):
        added += int(add_bytes(np.frombuffer(piece, np.uint8), place))
        place += len(piece)
    return f"{added % 2**64:016x}"
