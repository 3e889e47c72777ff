"""Count the users of a pack that a job made for itself, and delete it with the last one.

    PATH.lease   locked (shared) by every process that uses the pack PATH
    PATH.lock    locked by the process that builds it
    PATH/stays   the pack is kept: only `cache rm` deletes it

A killed process holds no lock. A lock file that is not locked has no meaning. It is deleted only under its
lock: a process that waits for the lock of a deleted file opens the new one.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator

from common.ground.files import locked

_STAYS = "stays"


@contextlib.contextmanager
def leased(path: str) -> Iterator[None]:
    """Use the pack at `path`, which need not exist yet, until the block ends. Raises OSError.

    The last process to end its use deletes the pack, unless it is kept. A pack that exists without a lease
    file is kept, for example one of `cache preload`.
    """
    if os.path.isdir(path) and not os.path.exists(f"{path}.lease"):
        keep(path)
    try:
        with locked(f"{path}.lease", shared=True):  # waits while the pack is deleted
            yield
    finally:
        _delete_unused(path)


def keep(path: str) -> None:
    """Mark a pack as kept, if it exists and its place can be written."""
    with contextlib.suppress(OSError), open(os.path.join(path, _STAYS), "a"):
        pass


def sweep(folder: str) -> None:
    """Delete the packs in a folder whose last user was killed."""
    for name in os.listdir(folder):
        path, ending = os.path.splitext(os.path.join(folder, name))
        if ending == ".lease":
            _delete_unused(path)


def _delete_unused(path: str) -> None:
    """Delete a pack and its lock files, unless it is used, being built, or kept."""
    with _try_lock(f"{path}.lease") as is_unused:
        if not is_unused or os.path.exists(os.path.join(path, _STAYS)):
            return
        with _try_lock(f"{path}.lock") as is_finished:
            if is_finished:
                shutil.rmtree(path, ignore_errors=True)
                for file in (f"{path}.lock", f"{path}.lease"):
                    with contextlib.suppress(OSError):
                        os.unlink(file)


@contextlib.contextmanager
def _try_lock(path: str) -> Iterator[bool]:
    """Lock a file without waiting. Yields False if another process holds the lock."""
    with contextlib.ExitStack() as stack:
        is_locked = False
        with contextlib.suppress(OSError):
            stack.enter_context(locked(path, wait=False))
            is_locked = True
        yield is_locked
