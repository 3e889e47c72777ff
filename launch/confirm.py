"""Ask before something is created, stopped, deleted or replaced."""

import os
import re
import sys

from common.ground.exits import BadInput

_HEAD = 4096  # bytes of a file in which the mark is searched


def ask(question: str) -> bool:
    """Return whether the user answers yes. An empty answer counts as no."""
    print(f"{question}? [y/N] ", end="", flush=True)
    answer = sys.stdin.readline().strip().lower()
    if not sys.stdin.isatty():
        print()
    return answer in ("y", "yes")


def ask_on_terminal(question: str, yes: bool) -> bool:
    """Return whether the user answers yes. If `yes` is set, return True without asking.

    Raises BadInput if there is no terminal.
    """
    if not yes and not sys.stdin.isatty():
        raise BadInput(f"cannot ask without a terminal: pass --yes to {question}")
    return yes or ask(question)


def check_replaceable(path: str, mark: re.Pattern, force: bool) -> None:
    """Raise BadInput if `path` is a file without `mark` in its first _HEAD bytes, unless `force` is set."""
    if not force and os.path.lexists(path) and not os.path.isdir(path) and not _has_mark(path, mark):
        raise BadInput(
            f"--to {path} exists and was not made by this command: name another file, or add --force"
        )


def _has_mark(path: str, mark: re.Pattern) -> bool:
    if not os.path.isfile(path):  # a pipe or a device would block
        return False
    try:
        with open(path, "rb") as file:
            return mark.search(file.read(_HEAD).decode(errors="replace")) is not None
    except OSError:
        return False
