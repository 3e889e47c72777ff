"""The finding, and the place where it is."""

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any

from bootfile.lint.table import RULES


@dataclass(frozen=True, order=True, slots=True)
class Finding:
    """One finding. rule: "R103". is_hint: it may be intended, and does not change the exit code. fix: text
    in place of that of the rule. resume_with: the options with which the script continues a run. script: the
    one that was read, which may import the file of the finding.

    evidence: what a repair needs: "event" is the event, loop, value or syntax node at the place of the
    finding; "value" the object or number; "save" and "load" the events that write and read the checkpoint.
    """

    path: str
    line: int
    rule: str
    message: str
    is_hint: bool = False
    fix: str = ""
    resume_with: str = "--resume OUT/last.pt"
    script: str = ""
    evidence: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def as_hint(self) -> "Finding":
        """Return the finding as a hint."""
        return dataclasses.replace(self, is_hint=True)


def at(event: Any, rule: str, message: str, is_hint: bool = False, **evidence: Any) -> Finding:
    """Return a finding at the place of an event, loop or value; a hint if its rule gives hints only."""
    is_hint = is_hint or RULES[rule].is_hint
    return Finding(event.path, event.line, rule, message, is_hint, evidence={"event": event, **evidence})


def name_line(event: Any, other: Any) -> str:
    """Return "line 57", with the file if it is another one than that of the finding."""
    is_same = event.path == other.path
    return f"line {event.line}" if is_same else f"line {event.line} of {os.path.basename(event.path)}"
