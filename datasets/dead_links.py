"""Find a link on a path that leads nowhere, because its disk is not mounted."""

import errno
import os
from collections.abc import Iterable

from bootfile.ground.errors import BadInput


def describe_dead_link(path: str) -> str:
    """Return "LINK is a link to TARGET, which does not exist" for the first link on a path that leads
    nowhere. "" if there is none. A walk over folders sees a link whose disk is not mounted as a file: a class
    behind one would be left out, and the classes after it would get other numbers."""
    parts = os.path.abspath(path).split("/")
    paths = ("/".join(parts[:count]) for count in range(2, len(parts) + 1))
    for link in filter(os.path.islink, paths):  # from the root on: the first one is the reason
        try:
            os.stat(link)
        except OSError as error:
            is_missing = error.errno == errno.ENOENT
            reason = "does not exist" if is_missing else f"cannot be opened ({error.strerror})"
            return f"{link} is a link to {os.readlink(link)}, which {reason}"
    return ""


def describe_dead_links(paths: Iterable[str]) -> str:
    """Return "; " and describe_dead_link() of the first of these paths that has one, for the end of a
    message; "" without one."""
    return next((f"; {line}" for line in map(describe_dead_link, paths) if line), "")


def refuse_dead_link(path: str) -> None:
    """Raise BadInput if a link on a path leads nowhere."""
    line = describe_dead_link(path)
    if line:
        raise BadInput(f"{line}: mount its disk, or correct or delete the link")
