"""Check and write the files and folders that a command makes: those of --to and --keep."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import BinaryIO

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, open_atomic, opener

_HEAD = 4096  # bytes of a file in which the mark is searched


def check_replaceable(path: str, mark: re.Pattern[str], force: bool) -> None:
    """Raise BadInput if no file can be made at `path`, or if it is a file without `mark` in its first _HEAD
    bytes and `force` is not set. Nothing is written."""
    check_folder(path)
    if force or not os.path.lexists(path):
        return
    # a file that cannot be read, such as a pipe, is not one of ours
    with contextlib.suppress(OSError), open(path, "rb", opener=opener) as file:
        if mark.search(file.read(_HEAD).decode(errors="replace")):
            return
    raise BadInput(f"--to {path} exists and was not made by this command: name another file, or add --force")


def check_folder(path: str) -> None:
    """Raise BadInput if no file can be made at `path`."""
    # asked before the work of minutes or hours, whose result must not be lost for its name
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise BadInput(f"--to {path} is a folder")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise BadInput(f"--to {path}: {folder} is not a folder in which this user can write")


def make_empty(folder: str) -> None:
    """Make the folder of --keep. Raises BadInput if it cannot be made, or if it has files."""
    with explained(f"--keep {folder}"):
        os.makedirs(folder, exist_ok=True)
        if os.listdir(folder):
            raise BadInput(f"--keep {folder} is not empty")


@contextlib.contextmanager
def open_result(path: str) -> Iterator[BinaryIO]:
    """Open the file of --to for writing, as open_atomic() does. Raises BadInput."""
    with explained(f"cannot write --to {path}"), open_atomic(path) as file:
        yield file
