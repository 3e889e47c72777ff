"""Hold the output folder of a run: one process at a time writes to it.

FOLDER/.lock      exists while a process holds FOLDER; a killed one leaves it there
FOLDER/.lease/    the same on mounts whose locks end at this node (lease.py)
"""

import contextlib
import fcntl
import io
import os
import time
from typing import TYPE_CHECKING

from bootfile.ground.errors import BadInput, print_line
from bootfile.ground.files import explained, is_at, opener
from bootfile.ground.heartbeat import watched
from bootfile.ground.mounts import find_local_locks

if TYPE_CHECKING:
    from bootfile.ground.lease import FolderLease

LOCK = ".lock"
_BUSY = 10.0  # seconds that a start waits for the previous one to end

# (process, path of the file LOCK) -> what that process holds. A record lock ends when its process closes the
# file anywhere, so a process opens the file once, also if a notebook starts its loop again.
_held: dict[tuple[int, str], "_Held"] = {}


class FolderLock:
    """The right of this process to write to a folder, from hold() until release() or the end of the process.

    folder: a path; hold() makes it if it is missing.
    refusal: the text of the error if another process holds it.
    `was_left`: whether a process that held the folder before was killed.
    """

    def __init__(self, folder: str, refusal: str):
        self.folder = folder
        self.refusal = refusal
        self.was_left = False
        self._path = os.path.join(os.path.realpath(folder), LOCK)

    def hold(self) -> None:
        """Make this process the only one that writes to the folder. It waits up to 10 s for another one that
        is just ending. Raises BadInput if that does not end, and if the folder cannot be written.

        The loop calls it on rank 0 before it looks for a checkpoint. The lock is a record lock (lockf): a
        child does not inherit it, and it ends with the process.
        """
        key = os.getpid(), self._path
        # a notebook may start its loop again: the process holds the folder already
        if key in _held and is_at(_held[key].file.fileno(), self._path):
            return
        # before it is made: release() removes only the folders that were missing
        missing = missing_folders(self.folder)
        file = self._lock_file()
        _held[key] = _Held(file, missing)
        kind = find_local_locks(os.path.dirname(self._path))
        if not kind:
            return
        from bootfile.ground.lease import FolderLease  # the lock does not keep other nodes away

        try:
            _held[key].lease = FolderLease(self.folder)
        except OSError as error:
            print_line(
                f"warning: no lease in {self.folder} ({kind}: {error.strerror}): do not start two jobs with "
                "this folder"
            )

    @property
    def is_held(self) -> bool:
        """Return whether this process holds the folder."""
        return (os.getpid(), self._path) in _held

    def release(self) -> None:
        """Release the folder for other processes. Folders that hold() has made and that are still empty are
        removed: a start that was refused leaves the disk as it was."""
        held = _held.pop((os.getpid(), self._path), None)
        if held is None:
            return
        if held.lease:
            with contextlib.suppress(BadInput, OSError):
                held.lease.release()
        # deleted under the lock: a start that waits for it sees by is_at() that its file is gone
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        held.file.close()
        remove_empty(held.made)

    def _lock_file(self) -> io.TextIOWrapper:
        """Return the file LOCK, open and locked, or without a lock where the file system has none."""
        deadline = time.monotonic() + _BUSY
        while True:
            with explained(f"the output folder {self.folder} cannot be written"), watched(self.folder):
                os.makedirs(self.folder, exist_ok=True)
                # a file that is there and not locked was left by a process that was killed
                was_there = os.path.exists(self._path)
                file = open(self._path, "a", opener=opener)  # noqa: SIM115  # open while it is held
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # the holder before may have deleted the file between open() and the lock
                if is_at(file.fileno(), self._path):
                    self.was_left = was_there
                    return file
            except (BlockingIOError, PermissionError):
                pass
            except OSError as error:
                print_line(
                    f"warning: cannot lock {self.folder} ({error.strerror}): do not start two jobs with this "
                    "folder"
                )
                return file
            file.close()  # another process holds the lock, or has just deleted the file
            if time.monotonic() > deadline:
                raise BadInput(self.refusal)
            time.sleep(0.2)


class _Held:
    """A folder that is held. file: the open file LOCK. made: the folders that were made for it."""

    def __init__(self, file: io.TextIOWrapper, made: list[str]):
        self.file = file
        self.made = made
        self.lease: FolderLease | None = None


def missing_folders(folder: str) -> list[str]:
    """Return the folders that makedirs() would make, the outermost first."""
    missing: list[str] = []
    folder = os.path.abspath(folder)
    while not os.path.lexists(folder):
        missing.insert(0, folder)
        folder = os.path.dirname(folder)
    return missing


def remove_empty(folders: list[str]) -> None:
    """Remove those of the folders that are empty. folders: the outermost first."""
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
