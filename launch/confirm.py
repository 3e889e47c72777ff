"""Ask before something is created, stopped, deleted or replaced."""

import os
import re
import sys

from common.ground.exits import BadInput

_HEAD = 4096  # bytes of a file in which the mark is searched


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


def check_replaceable(path: str, mark: re.Pattern, force: bool) -> None:
    """Raise BadInput if no file can be made at `path`, or if it is a file without `mark` in its first _HEAD
    bytes and `force` is not set. Nothing is written."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise BadInput(f"--to {path} is a folder")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise BadInput(f"--to {path}: {folder} is not a folder in which this user can write")
    if not force and os.path.lexists(path) and not _has_mark(path, mark):
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
