"""States of versions 0.47 to 0.50, which gave new fields no new format, continued as those of today.

A later version deletes this file as a whole.
"""

from typing import Any

from bootfile.exact.files import Refused
from bootfile.exact.state import FORMAT

_FORMER = 2


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
