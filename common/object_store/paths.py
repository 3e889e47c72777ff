"""Where the objects of a store lie as files, and the hidden files in which they arrive."""

import contextlib
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterable

from common.exits import BadInput
from common.object_store.errors import is_full, of_the_disk, shown

_PARTIAL = (".bootfile-", ".partial")


def check_keys(keys: Iterable[str], url: str) -> None:
    """Raises BadInput, with the key, where keys are no paths of files below a folder, or not all of them at
    once: `a` and `a/b`."""
    keys, folders = set(keys), set()
    for key in keys:
        parts = key.split("/")
        reason = None
        if {"", ".", ".."} & set(parts):
            reason = "it has an empty part, . or .."
        elif not key.isprintable() or "\\" in key:
            reason = "it holds a control character or a backslash"
        elif any(len(os.fsencode(part)) > 255 for part in parts) or len(os.fsencode(key)) > 3000:
            reason = "it is too long for the name of a file"
        elif is_partial(parts[-1]):
            reason = "it is a name for fetches that are not finished"
        if reason:
            raise BadInput(f"{url}: key {shown(key)} is no path of a file: {reason}")
        folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
    for key in keys & folders:
        raise BadInput(f"{url}: key {shown(key)} is a file, and a folder of other keys as well")


def local_path(folder: str, key: str) -> str:
    """Where a key belongs below a folder. Raises BadInput, with the key, where it would lie anywhere else, or
    be no file name here."""
    check_keys([key], folder)
    path = os.path.join(folder, key)
    inside = os.path.realpath(folder)
    if os.path.commonpath([inside, os.path.realpath(os.path.dirname(path))]) != inside:
        raise BadInput(f"key {shown(key)}: a link leads out of {folder}")
    return path


def is_partial(name: str) -> bool:
    """Whether a file is what a fetch has not finished."""
    return name.startswith(_PARTIAL[0]) and name.endswith(_PARTIAL[1])


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
        if is_partial(name):
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
