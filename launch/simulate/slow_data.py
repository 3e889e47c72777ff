"""Make the data of a simulated node slow, as a slow mount does: the fault slow_data.

Python opens each file below the node's input folder some time later, also in the workers of a rank. A hook in
the interpreter waits (hooks/sitecustomize.py). Small files in a folder tell it whether, and how long.
"""

import contextlib
import os

from launch.profiles import Folders


def prepare(folders: Folders) -> str:
    """Return the variable that tells the hook of a node's processes its folders. Commands calls it before
    each start of a node, if a fault needs it."""
    control = _control(folders)
    os.makedirs(control, exist_ok=True)
    return os.pathsep.join([control, folders.inputs])


def begin(folders: Folders, rank: int | None, delay: float) -> None:
    """Open the files of a node's input later from now on. rank: only in the processes of this one; None: of
    all. delay: seconds."""
    path = _path(folders, rank)
    with open(f"{path}.new", "w", encoding="ascii") as file:
        file.write(str(delay))
    os.replace(f"{path}.new", path)  # a process may read it at any time


def end(folders: Folders, rank: int | None) -> None:
    """Open these files at once again."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(_path(folders, rank))


def _control(folders: Folders) -> str:
    return f"{folders.logs}-slow-data"


def _path(folders: Folders, rank: int | None) -> str:
    name = "all" if rank is None else f"rank-{rank}"
    return os.path.join(_control(folders), name)
