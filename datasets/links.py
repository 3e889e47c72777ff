"""Name the links of a data set that lead nowhere: their disk is not mounted, or their target was deleted.

A walk over folders sees such a link as a file. Without these lines a class behind one would be left out, and
the classes after it would get other numbers.
"""

import errno
import os
from collections.abc import Iterable

from bootfile.ground.errors import BadInput

# Endings of files that a data set of images leaves out. A link to nothing with another ending may have been
# a folder.
_LEFT_OUT = (
    ".txt", ".md", ".rst", ".json", ".jsonl", ".csv", ".tsv", ".xml", ".yaml", ".yml", ".html", ".log",
    ".pdf", ".py", ".ipynb", ".sh", ".m", ".zip", ".gz", ".tgz", ".xz", ".7z", ".rar", ".db", ".pkl", ".npy",
    ".npz", ".mat", ".h5", ".parquet", ".gif", ".heic", ".avi", ".mp4", ".cls",
)  # fmt: skip


def may_be_folder(name: str) -> bool:
    """Return whether a link to nothing may have led to a folder, by its name."""
    return not name.lower().endswith(_LEFT_OUT)


def describe(path: str) -> str:
    """Return "LINK is a link to TARGET, which does not exist" for the first link on a path that leads
    nowhere, with another reason if it cannot be followed. "" if there is none."""
    place = os.path.abspath(path)
    parents = [place]
    while os.path.dirname(place) != place:
        place = os.path.dirname(place)
        parents.append(place)
    # from the root on: the first link that leads nowhere is the reason
    for part in reversed(parents):
        if not os.path.islink(part):
            continue
        try:
            os.stat(part)
        except OSError as error:
            reason = "which does not exist"
            if error.errno != errno.ENOENT:
                reason = f"which cannot be opened ({error.strerror})"
            return f"{part} is a link to {os.readlink(part)}, {reason}"
    return ""


def describe_first(paths: Iterable[str]) -> str:
    """Return "; " and describe() of the first of these paths that has one, for the end of a message; ""
    without one."""
    for path in paths:
        line = describe(path)
        if line:
            return f"; {line}"
    return ""


def refuse(path: str) -> None:
    """Raise BadInput if a link on a path leads nowhere. Those who look for a file or a folder call it when
    they do not find it, and before they take another one in its place."""
    line = describe(path)
    if line:
        raise BadInput(f"{line}: mount its disk, or correct or delete the link")
