"""Where the objects of a store lie as files, and the hidden files in which they arrive."""

import contextlib
import fcntl
import hashlib
import os
import threading

from common.exits import BadInput
from common.object_store_errors import is_full, of_the_disk, shown

_PARTIAL = (".bootfile-", ".partial")


def local_path(folder: str, key: str) -> str:
    """Where a key belongs below a folder. Raises BadInput, with the key, where it would lie anywhere else or
    be no file name here."""
    parts = key.split("/")
    if {"", ".", ".."} & set(parts) or "\\" in key or not key.isprintable():
        raise BadInput(f"key {shown(key)} is no path below a folder: nothing is fetched")
    if any(len(os.fsencode(part)) > 255 for part in parts) or parts[-1].startswith(_PARTIAL[0]):
        raise BadInput(f"key {shown(key)} is no name of a file: nothing is fetched")
    path = os.path.join(folder, *parts)
    inside = os.path.realpath(folder)
    if os.path.commonpath([inside, os.path.realpath(os.path.dirname(path))]) != inside:
        raise BadInput(f"key {shown(key)}: a link leads out of {folder}")
    return path


def make_folder_of(path: str, key: str) -> None:
    """Make the folders above a path. Raises BadInput where a file is in the way."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise BadInput(
            f"key {shown(key)}: a file stands where its folder belongs ({error.filename})"
        ) from error
    except OSError as error:
        raise of_the_disk(error, path) from error


def sweep(folder: str) -> None:
    """Remove what killed fetches have left in a folder; not what another process is writing."""
    for name in os.listdir(folder):
        if name.startswith(_PARTIAL[0]) and name.endswith(_PARTIAL[1]):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)


class PartialFile:
    """A hidden file beside `path`, open to go on with, that belongs to this process alone. It is removed when
    the disk is full, and where nothing came."""

    def __init__(self, path: str, identity: str):
        name = hashlib.sha256(os.fsencode(identity)).hexdigest()[:16]
        self.path = os.path.join(os.path.dirname(path), name.join(_PARTIAL))

    def __enter__(self):
        self.file = open(self.path, "a+b")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(self.file.fileno()), os.stat(self.path)):
                return self.file
        except (
            OSError
        ):  # another process or thread fetches it, too, or has just finished, or there are no locks
            pass
        self.file.close()
        own = f"-{os.getpid()}-{threading.get_ident()}{_PARTIAL[1]}"
        self.path = self.path.replace(_PARTIAL[1], own)
        self.file = open(self.path, "w+b")
        return self.file

    def __exit__(self, kind, error, trace):
        full = isinstance(error, OSError) and is_full(error)
        with contextlib.suppress(OSError):
            if full or (kind and not os.fstat(self.file.fileno()).st_size):
                os.unlink(self.path)
        with contextlib.suppress(OSError):  # what could not be written cannot be flushed either
            self.file.close()


def finish(file, path: str) -> None:
    """Give an open partial file its name, once it is on the disk."""
    file.flush()
    os.fsync(file.fileno())
    os.replace(file.name, path)
