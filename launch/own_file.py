"""Files that a verb writes with --to: only a file that the same verb has made is replaced."""

import os
import re

from common.exits import BadInput

_HEAD = 4096  # bytes in which the mark is searched


def check(path: str, mark: re.Pattern, force: bool) -> None:
    """Raises BadInput if `path` exists and its first bytes do not match `mark`, unless `force`."""
    if force or not os.path.lexists(path) or os.path.isdir(path) or _is_ours(path, mark):
        return
    raise BadInput(f"--to {path} exists and was not made by this command: name another file, or add --force")


def _is_ours(path: str, mark: re.Pattern) -> bool:
    if not os.path.isfile(path):  # a pipe or a device would block
        return False
    try:
        with open(path, "rb") as file:
            return mark.search(file.read(_HEAD).decode(errors="replace")) is not None
    except OSError:
        return False
