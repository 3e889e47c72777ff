"""Files of one run or many: write them atomically, and open regular files only.

A temporary file has a new name, and the permissions that the umask allows. tempfile gives the owner's alone,
and the umask cannot be read without setting it for all threads.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder that holds jobs/ and common/
PARTIAL = ".partial-"


@contextlib.contextmanager
def partial(path: str, mode: int = 0o666):
    """Open a binary file that appears as `path` when the block ends, and is removed if the block fails. It is
    locked until then: a sweep of another process leaves it. mode: permissions before the umask."""
    handle, name = make_file(PARTIAL, os.path.dirname(path), mode)
    try:
        with os.fdopen(handle, "wb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_text(path: str, text: str, mode: int = 0o666) -> None:
    """Make a small file appear, whole and on the disk. mode: permissions before the umask. Raises OSError."""
    with partial(path, mode) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def make_file(prefix: str, folder: str, mode: int = 0o666) -> tuple[int, str]:
    """Create a file in a folder: (open file descriptor, path). Raises OSError."""
    path = _name(prefix, folder)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), path


def make_folder(prefix: str, folder: str) -> str:
    """Create a folder in a folder, and return its path. Raises OSError."""
    path = _name(prefix, folder)
    os.mkdir(path)
    return path


def _name(prefix: str, folder: str) -> str:
    return os.path.join(folder, f"{prefix}{secrets.token_hex(8)}")


def opener(path: str, flags: int) -> int:
    """Open a file for open(..., opener=opener). Raises OSError for a FIFO, on which open() waits without an
    end, and for everything else that is not a regular file."""
    handle = os.open(path, flags | os.O_NONBLOCK, 0o666)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "not a regular file", path)
