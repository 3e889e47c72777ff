"""Ask before something is created, deleted or replaced."""

import sys

from bootfile.ground.errors import BadInput


def ask(question: str, yes: bool) -> bool:
    """Return whether the user answers yes; an empty answer counts as no. If `yes` is set, return True without
    asking.

    Raises BadInput if there is no terminal.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise BadInput(f"cannot ask without a terminal: pass --yes to {question}")
    print(f"{question}? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
