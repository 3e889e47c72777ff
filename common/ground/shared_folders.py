"""Folders that several processes or users share: locks, owners, folders that appear at once.

A job with data in memory does not load this module.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

from bootfile.ground.errors import BadInput
from bootfile.ground.files import PARTIAL, is_at, lock


@contextlib.contextmanager
def make_folder_atomic(path: str) -> Iterator[str]:
    """Yield a new folder that is renamed to `path` when the block ends, in place of a folder of that name.
    Two processes must not make the same folder at the same time: use locked(). If the block fails, the new
    folder is deleted. Raises OSError."""
    new = os.path.join(os.path.dirname(path), f"{PARTIAL}{os.path.basename(path)}")
    old = f"{new}.old"
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    os.mkdir(new)
    try:
        yield new
        if os.path.isdir(path):
            # a folder cannot take the place of another one in one step: for a moment there is none
            os.rename(path, old)
        os.rename(new, path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def locked(path: str, shared: bool = False, wait: bool = True) -> Iterator[int]:
    """Hold a lock on a folder, or on a file, which is made if it is missing. Yields the open descriptor.

    It excludes other processes and threads; over NFS also other nodes. shared: allow other shared locks.
    wait: if False, it raises BlockingIOError when the lock is not free. The file is not deleted. A holder may
    delete it: the next one makes a new file. Raises OSError.
    """
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        flags = os.O_RDONLY if os.path.isdir(path) else os.O_RDWR | os.O_CREAT
        handle = os.open(path, flags | os.O_CLOEXEC, 0o666)
        try:
            lock(handle, kind)
            if is_at(handle, path):  # otherwise the previous holder has deleted it
                yield handle
                return
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # also for a child that has inherited the descriptor
            os.close(handle)


def own_place(path: str, log: Callable[[str], object], *users: int) -> str:
    """Return the path if it is missing, or if it and its files belong to this user, to root or to `users`. Or
    else log a line and return the path with the number of this user. Raises BadInput if that is another's."""
    known = {0, os.geteuid(), *users}
    for place in (path, f"{path}-{os.geteuid()}"):
        try:
            owners = {os.lstat(place).st_uid}
            if owners <= known and os.path.isdir(place):
                owners |= {os.lstat(os.path.join(place, name)).st_uid for name in os.listdir(place)}
        except OSError:  # it is missing, or cannot be opened
            return place
        owners -= known
        if owners:  # some network file systems show one owner for all files
            with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=os.path.dirname(place)) as new:
                owners.discard(os.fstat(new.fileno()).st_uid)
        if not owners:
            return place
        log(f"{place} belongs to user {min(owners)}: it is not used")
    raise BadInput(f"{place} belongs to user {min(owners)}, expected {os.geteuid()}: use another folder")
