"""The finding, and the place where it is."""

import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Finding(NamedTuple):
    """One finding. rule: "R103". is_hint: it may be intended, and does not change the exit code. fix: text
    in place of that of the rule. resume_with: the options with which the script continues a run. script: the
    one that was read, which may import the file of the finding."""

    path: str
    line: int
    rule: str
    message: str
    is_hint: bool = False
    fix: str = ""
    resume_with: str = "--resume OUT/last.pt"
    script: str = ""


def at(event: Any, rule: str, message: str, is_hint: bool = False) -> Finding:
    """Return a finding at the place of an event, loop or value."""
    return Finding(event.path, event.line, rule, message, is_hint)


def as_hints(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings as hints."""
    for finding in findings:
        yield finding._replace(is_hint=True)


def of_a_restart(findings: Iterable[Finding], facts: Any) -> Iterator[Finding]:
    """Yield the findings about restarts if the script trains, saves and continues. They are hints if it may
    only begin a new training with weights."""
    if not facts.loops or not facts.saves or not facts.intent:
        return
    if facts.is_sure:
        yield from findings
    else:
        yield from as_hints(findings)


def name_line(event: Any, other: Any) -> str:
    """Return "line 57", with the file if it is another one than that of the finding."""
    if event.path == other.path:
        return f"line {event.line}"
    return f"line {event.line} of {os.path.basename(event.path)}"
