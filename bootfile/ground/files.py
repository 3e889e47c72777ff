"""Write files atomically, lock and hash them, and open regular files only.

A temporary file gets a new name and the permissions that the umask allows. (tempfile makes files that only
the owner may read, and the umask cannot be read without setting it for all threads.)
"""

import contextlib
import errno
import fcntl
import functools
import glob
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar

from bootfile.ground.errors import BadInput, Once, in_one_line, print_line

T = TypeVar("T")

PARTIAL = ".partial-"  # the names of temporary files and folders begin with this
_BLOCK = 2**20  # bytes
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # Lustre and NFS without locks, for example
_UNLOCKED = 86400.0  # seconds after which a temporary file is deleted on a file system without locks

_warn_once = Once(print_line)


@contextlib.contextmanager
def open_atomic(path: str, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a binary file for writing. It appears as `path`, synced to disk, when the block ends.

    mode: permissions before the umask. If the block fails, the file is deleted. It is locked during the
    block, so sweep() in another process does not delete it. Raises OSError.
    """
    while True:
        name = os.path.join(os.path.dirname(path), f"{PARTIAL}{secrets.token_hex(8)}")
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with contextlib.suppress(OSError):
            lock(handle, fcntl.LOCK_EX)
        if os.path.lexists(name):
            break
        os.close(handle)  # sweep() of another thread was faster than the lock
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            # first the content, then the name: after a power cut there is the old file, or the whole new one
            file.flush()
            os.fsync(file.fileno())
            os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_atomic(path: str, content: str | bytes, mode: int = 0o666) -> None:
    """Write a small file, as open_atomic() does. Text is encoded as UTF-8. Raises OSError."""
    if isinstance(content, str):
        content = content.encode()
    with open_atomic(path, mode) as file:
        file.write(content)


def sync_folder(folder: str) -> None:
    """Sync the names in a folder to disk, if the file system can. Raises OSError if it is missing."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # mounts of object stores cannot sync a folder
            os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: str) -> None:
    """Delete the temporary files of killed processes in a folder, but not those that a process has locked."""
    for path in glob.glob(os.path.join(glob.escape(folder), f"{PARTIAL}*")):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            # its writer holds the lock as long as it lives; without locks only the age tells
            is_locked = lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_locked or time.time() - os.stat(path).st_mtime > _UNLOCKED:
                os.unlink(path)


def lock(handle: int, kind: int) -> bool:
    """Lock an open file or folder. Return False on a file system without locks; a warning is then printed,
    once. Raises OSError."""
    try:
        fcntl.flock(handle, kind)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _warn_once(
            f"warning: a file system has no locks ({error.strerror}): do not start two jobs at a time that "
            "make the same index, pack or download"
        )
        return False
    return True


def parse_json_lines(content: bytes) -> list[dict[str, Any]]:
    """Return the objects in JSON lines, without damaged lines."""
    objects = []
    for text in content.decode(errors="replace").split("\n"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(text)
            if isinstance(value, dict):
                objects.append(value)
    return objects


def append_json_line(path: str, value: dict[str, Any]) -> None:
    """Append an object to a file of JSON lines. Raises OSError."""
    append_lines(path, json.dumps(value) + "\n")


def append_lines(path: str, lines: str) -> None:
    """Append whole lines to a file, after the line before, which may be cut. Raises OSError."""
    with open(path, "ab+", opener=opener) as file:
        last = os.pread(file.fileno(), 1, max(0, file.tell() - 1))
        if last not in (b"", b"\n"):  # a full disk or a kill has cut it: these lines would be lost with it
            file.write(b"\n")
        file.write(lines.encode())


def state_of(path: str) -> tuple[int, int, int]:
    """Return a value that changes when a file is replaced or written to: (inode, bytes, time of the last
    change in ns). Raises OSError."""
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


@functools.cache
def _mount_of(path: str) -> str:
    """Return the mount that holds a path at the first call."""
    path = os.path.realpath(path)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def check_mounted(folder: str) -> None:
    """Raise OSError if the mount that held a folder at the first call is gone: the folder below it is on
    another file system."""
    mount = _mount_of(folder)
    if not os.path.ismount(mount):
        raise OSError(errno.ENODEV, f"{mount} is not mounted any more")


def explain_write(error: Exception, path: str) -> str:
    """Return the reason of an error of the disk and where it is: again.explain_write()."""
    try:
        from bootfile.ground import again  # no run loads it without such an error
    except (ImportError, OSError):  # too many open files, or the disk with the code is gone, too
        return str(error)
    return again.explain_write(error, path)


@contextlib.contextmanager
def explained(failure: str, *others: type[Exception], kind: type[Exception] = BadInput) -> Iterator[None]:
    """Raise an error with a text for users in place of an OSError of the block, or of one of `others`.

    failure: the text before the reason, as in "cannot read FILE: Permission denied".
    kind: of the new error; Unavailable in place of BadInput if the file system may answer later.
    A BadInput of the block, which has a text for users, stays as it is, and so does an error of this kind.
    """
    explainable: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except (BadInput, kind):  # BadInput is a ValueError, which may be one of the others
        raise
    except explainable as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else in_one_line(error)
        line = f"{failure}: {reason}"
        if kind is BadInput:
            from bootfile.ground.again import refusal

            raise refusal(line, error) from error
        raise kind(line) from error


def read_again(read: Callable[[], T], path: str) -> T:
    """Return read(), which is repeated for some seconds if the file system of `path` does not answer. Readers
    call it for each file, in any thread or process. Raises the exceptions of read()."""
    try:
        return read()
    except FileNotFoundError:
        raise
    except Exception as error:
        from bootfile.ground import again  # no run loads it without such an error

        return again.repeat(read, path, error)


def sha256_file(file: str | BinaryIO) -> str:
    """Return the sha256 of a file, 64 hex digits. file: a path, or an open file, which is read from its
    position. Raises OSError.
    """
    if isinstance(file, str):
        with open(file, "rb") as opened:
            return sha256_file(opened)
    return digest_file(file, hashlib.sha256())


def digest_file(file: BinaryIO, digest: Any) -> str:
    """Return the hex digits of a digest of hashlib, after the content of an open file from its position.
    Raises OSError."""
    while block := file.read(_BLOCK):
        digest.update(block)
    digits: str = digest.hexdigest()
    return digits


def opener(path: str, flags: int) -> int:
    """Open a file for open(..., opener=opener). Raises OSError if it is not a regular file.

    Without it, open() waits for ever on a FIFO without a writer, and writes to the target of a link.
    """
    is_writing = flags & (os.O_WRONLY | os.O_RDWR)
    if is_writing:
        flags |= os.O_NOFOLLOW
    # the type is known only after it is open; without waiting, because a FIFO has no writer yet
    handle = os.open(path, flags | os.O_NONBLOCK, 0o666)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "not a regular file", path)


def is_at(handle: int, path: str) -> bool:
    """Return whether an open descriptor belongs to the file at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def read_file(path: str, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises OSError for any other."""

    def read() -> bytes:
        with open(path, "rb", opener=opener) as file:
            if os.fstat(file.fileno()).st_size <= most:
                content = file.read()  # may be longer: files of /proc have the size 0
                if len(content) <= most:
                    return content
        raise OSError(errno.EFBIG, f"larger than {most} bytes", path)

    return read_again(read, path)
