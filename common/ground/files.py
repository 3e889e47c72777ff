"""Write files and folders atomically, lock them, hash them, and open regular files only.

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
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from common.ground.exits import BadInput, in_one_line, print_line

ROOT = os.path.abspath(
    f"{__file__}/../../.."
)  # the folder that holds jobs/ and common/, or one file of `pack`
HOME = ROOT if os.path.isdir(ROOT) else os.getcwd()  # where folders are looked for that the user did not name
PARTIAL = ".partial-"  # the names of temporary files and folders begin with this
_FSTAB = "/etc/fstab"
_BLOCK = 2**20  # bytes
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # Lustre and NFS without locks, for example
_UNLOCKED = 86400.0  # seconds after which a temporary file is deleted on a file system without locks


def is_url(path: object) -> bool:
    """Return whether this is a URL of an object store (s3:// or obs://), and not a path."""
    return isinstance(path, str) and path.startswith(("s3://", "obs://"))


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
            _lock(handle, fcntl.LOCK_EX)
        if os.path.lexists(name):
            break
        os.close(handle)  # sweep() of another thread was faster than the lock
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_atomic(path: str, content: str | bytes, mode: int = 0o666) -> None:
    """Write a small file, as open_atomic() does. Text is encoded as UTF-8. Raises OSError."""
    with open_atomic(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def make_folder_atomic(path: str) -> Iterator[str]:
    """Yield a new folder that is renamed to `path` when the block ends. It replaces a folder of that name.

    Two processes must not make the same folder at the same time: use locked(). If the block fails, the new
    folder is deleted. Folders that a killed process left are deleted first. A process that has opened files
    of the replaced folder can still read them. Raises OSError.
    """
    new = os.path.join(os.path.dirname(path), f"{PARTIAL}{os.path.basename(path)}")
    old = f"{new}.old"
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    os.mkdir(new)
    try:
        yield new
        if os.path.isdir(path):
            os.rename(path, old)
        os.rename(new, path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


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
            is_locked = _lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_locked or time.time() - os.stat(path).st_mtime > _UNLOCKED:
                os.unlink(path)


def _lock(handle: int, kind: int) -> bool:
    """Lock an open file or folder. Return False on a file system without locks; a warning is then printed,
    once. Raises OSError."""
    try:
        fcntl.flock(handle, kind)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _warn_of_locks(error.strerror)
        return False
    return True


@functools.cache  # one warning per process
def _warn_of_locks(reason: str) -> None:
    print_line(
        f"warning: a file system has no locks ({reason}): do not start two jobs at a time that make the same "
        "index, pack or download"
    )


def check_rename(folder: str) -> None:
    """Raise BadInput if a file in a folder cannot be replaced by a rename, as on some mounts of buckets."""
    path = os.path.join(folder, f"{PARTIAL}check")
    try:
        for _ in range(2):
            write_atomic(path, "")
        os.unlink(path)
    except OSError as error:
        raise BadInput(
            f"{folder}: a file cannot be replaced by a rename there ({error.strerror}), so no checkpoint can "
            "be saved: use a folder of another file system, or the s3:// URL of the bucket"
        ) from error


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
            _lock(handle, kind)
            if is_at(handle, path):  # otherwise the previous holder has deleted it
                yield handle
                return
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # also for a child that has inherited the descriptor
            os.close(handle)


def is_at(handle: int, path: str) -> bool:
    """Return whether an open descriptor belongs to the file at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


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
            with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=os.path.dirname(place)) as own:
                owners.discard(os.fstat(own.fileno()).st_uid)
        if not owners:
            return place
        log(f"{place} belongs to user {min(owners)}: it is not used")
    raise BadInput(f"{place} belongs to user {min(owners)}, expected {os.geteuid()}: use another folder")


def read_json_lines(path: str, most: int, whole: bool = False) -> list[dict]:
    """Return the objects in a file of JSON lines of at most `most` bytes, without damaged lines; [] if the
    file is missing. whole: raise BadInput if lines are damaged. Raises OSError."""
    try:
        content = read_file(path, most)
    except FileNotFoundError:
        return []
    objects = parse_json_lines(content)
    if whole:
        count = sum(bool(line.strip()) for line in content.split(b"\n"))
        if bad := count - len(objects):
            raise BadInput(
                f"{path}: {bad} of {count} lines are cut or damaged: delete them to use the others"
            )
    return objects


def parse_json_lines(content: bytes) -> list[dict]:
    """Return the objects in JSON lines, without damaged lines."""
    objects = []
    for text in content.decode(errors="replace").split("\n"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(text)
            objects += [value] if isinstance(value, dict) else []
    return objects


def append_json_line(path: str, value: dict) -> None:
    """Append an object to a file of JSON lines. Raises OSError."""
    with open(path, "a", encoding="utf-8", opener=opener) as file:
        file.write(json.dumps(value) + "\n")


def state_of(path: str) -> tuple[int, int, int]:
    """Return a value that changes when a file is replaced or written to: (inode, bytes, time of the last
    change in ns). Raises OSError."""
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


@functools.cache
def _mount_of(path: str) -> str:
    path = os.path.realpath(path)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def check_fstab(path: str) -> None:
    """Raise BadInput if /etc/fstab has a file system that holds a path, and it is not mounted: the results of
    earlier starts are not seen. "noauto" file systems may be left out."""
    path, lines = os.path.realpath(path), []
    with contextlib.suppress(OSError), open(_FSTAB, encoding="utf-8", errors="surrogateescape") as file:
        lines = [line.split() for line in file]
    for point, options in (words[1:4:2] for words in lines if len(words) > 3 and words[0][0] != "#"):
        point = os.path.normpath(point.replace(r"\040", " "))
        is_above = point.startswith("/") and os.path.commonpath([point, path]) == point
        if is_above and point != "/" and "noauto" not in options.split(",") and not os.path.ismount(point):
            raise BadInput(f"{path}: {point} is not mounted, and {_FSTAB} has a file system for it: mount it")


def check_mounted(folder: str) -> None:
    """Raise OSError if the mount that held a folder at the first call is gone: the folder below it is on
    another file system."""
    if not os.path.ismount(mount := _mount_of(folder)):
        raise OSError(errno.ENODEV, f"{mount} is not mounted any more")


def explain_write(error: Exception, path: str) -> str:
    """Return the reason of an error of the disk and the free space at the path: "No space left on device
    (12.0 MB free at FOLDER)"."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    if isinstance(error, OSError) and error.errno in (errno.EFBIG, errno.EDQUOT):
        return f"{reason} (a limit of the size of files, or a quota, at {path})"
    if isinstance(error, OSError) and error.errno == errno.ENODEV:
        return reason
    with contextlib.suppress(OSError):  # a stale mount
        space = os.statvfs(path)
        return f"{reason} ({space.f_bavail * space.f_frsize / 1e6:.1f} MB free at {path})"
    return reason


@contextlib.contextmanager
def explained(failure: str, *others: type[Exception], kind: type[Exception] = BadInput) -> Iterator[None]:
    """Raise `kind` for an OSError of the block, or one of the others: "cannot read FILE: Permission denied".

    failure: the text before the reason. A BadInput of the block, which has a text for users, stays as it is,
    and so does an error of this kind.
    """
    explainable: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except (BadInput, kind):  # BadInput is a ValueError, which may be one of the others
        raise
    except explainable as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else ""
        raise kind(f"{failure}: {reason or in_one_line(error)}") from error


def sha256_file(file: str | BinaryIO) -> str:
    """Return the sha256 of a file, 64 hex digits. file: a path, or an open file, which is read from its
    position. Raises OSError.
    """
    if isinstance(file, str):
        with open(file, "rb") as opened:
            return sha256_file(opened)
    return _digest(file, hashlib.sha256())


def has_digest(file: BinaryIO, digest: str) -> bool:
    """Return whether a sha256 (64 hex digits) or an MD5 is that of an open file from its position. Raises
    OSError."""
    kind = hashlib.sha256() if len(digest) == 64 else hashlib.md5(usedforsecurity=False)
    return _digest(file, kind) == digest


def _digest(file: BinaryIO, digest: Any) -> str:
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()


def opener(path: str, flags: int) -> int:
    """Open a file for open(..., opener=opener). Raises OSError if it is not a regular file.

    Without it, open() waits for ever on a FIFO without a writer, and writes to the target of a link.
    """
    flags |= os.O_NOFOLLOW * bool(flags & (os.O_WRONLY | os.O_RDWR))
    handle = os.open(path, flags | os.O_NONBLOCK, 0o666)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "not a regular file", path)


def read_file(path: str, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises OSError for any other."""
    with open(path, "rb", opener=opener) as file:
        is_small = os.fstat(file.fileno()).st_size <= most
        if is_small and len(content := file.read(most + 1)) <= most:  # files of /proc have the size 0
            return content
    raise OSError(errno.EFBIG, f"larger than {most} bytes", path)
