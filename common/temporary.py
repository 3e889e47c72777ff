"""Temporary files and folders that are renamed when they are whole.

The names are new, and the permissions are those that the umask allows. tempfile gives the owner's alone, and
the umask cannot be read without setting it for all threads.
"""

import contextlib
import os
import secrets

PARTIAL = ".partial-"


def write_text(path: str, text: str, mode: int = 0o666) -> None:
    """Make a small file appear, whole and on the disk. mode: permissions before the umask. Raises OSError."""
    handle, partial = make_file(PARTIAL, os.path.dirname(path), mode)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


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
