"""Who uses a pack that a job made for itself, and its removal by the last user.

    PATH.lease   locked by every process that uses the pack PATH
    PATH.lock    locked by the process that builds it
    PATH/stays   the pack was made to stay: only `cache rm` deletes it

A killed process holds no lock. The file alone means nothing, and it is deleted only under its lock: who waits
for the lock of a deleted file opens the new one.
"""

import contextlib
import fcntl
import os
import shutil

from common import files

_STAYS = "stays"


class Lease:
    """The use of the pack at `path`, which need not exist yet, by this process. Raises OSError.

    A pack that exists without a lease file was made to stay, by `cache preload` for one.
    """

    def __init__(self, path: str):
        self.path = path
        while True:
            if os.path.isdir(path) and not os.path.exists(f"{path}.lease"):
                keep(path)
            file = open(f"{path}.lease", "a")  # noqa: SIM115
            fcntl.flock(file, fcntl.LOCK_SH)  # waits while another process deletes the pack
            if files.is_at(file.fileno(), file.name):
                self._file = file
                return
            file.close()

    def release(self) -> None:
        """The last process deletes the pack, unless it was made to stay."""
        with self._file as file, contextlib.suppress(OSError):  # others use it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if files.is_at(file.fileno(), file.name):
                _delete(self.path)


def keep(path: str) -> None:
    """Mark a pack as made to stay, if it exists. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(path, _STAYS), "w"):
        pass


def keep_if_leased(path: str) -> None:
    """Mark a pack that a job made for itself as made to stay: a user has named it."""
    if os.path.exists(f"{path}.lease"):
        with contextlib.suppress(OSError):  # a place that cannot be written has no leases
            keep(path)


def sweep(folder: str) -> None:
    """Delete the packs in a folder whose last user was killed, and lock files without a pack."""
    for name in os.listdir(folder):
        path, ending = os.path.splitext(os.path.join(folder, name))
        if ending == ".lease":
            with _locked(f"{path}.lease", fcntl.flock) as locked:
                if locked:
                    _delete(path)
        elif ending == ".lock" and not os.path.exists(path):
            forget(path)


def forget(path: str) -> None:
    """Delete the lock files of a deleted pack, except those that another process has locked."""
    for ending, lock in ((".lock", fcntl.flock), (".lease", fcntl.flock)):
        with _locked(path + ending, lock) as locked:
            if locked:
                os.unlink(path + ending)


def _delete(path: str) -> None:
    """Delete a pack and its lock files, unless it stays or is being built. The caller holds the lease."""
    if os.path.exists(os.path.join(path, _STAYS)):
        return
    with contextlib.suppress(FileExistsError):
        os.close(os.open(f"{path}.lock", os.O_CREAT | os.O_EXCL, 0o600))
    with _locked(f"{path}.lock", fcntl.flock) as locked:
        if locked:
            shutil.rmtree(path, ignore_errors=True)
            os.unlink(f"{path}.lock")
            os.unlink(f"{path}.lease")


@contextlib.contextmanager
def _locked(path: str, lock):
    """Lock the file at `path` without waiting: yields whether this process has the lock."""
    with contextlib.ExitStack() as stack:
        locked = False
        with contextlib.suppress(OSError):  # missing, or locked by another process
            file = stack.enter_context(open(path, "r+"))
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = files.is_at(file.fileno(), path)
        yield locked
