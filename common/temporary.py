"""Temporary files and folders that are renamed when they are whole.

The names are new, and the permissions are those that the umask allows. tempfile gives the owner's alone, and
the umask cannot be read without setting it for all threads.
"""

import os
import secrets


def make_file(prefix: str, folder: str) -> tuple[int, str]:
    """Create a file in a folder: (open file descriptor, path). Raises OSError."""
    path = _name(prefix, folder)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path


def make_folder(prefix: str, folder: str) -> str:
    """Create a folder in a folder, and return its path. Raises OSError."""
    path = _name(prefix, folder)
    os.mkdir(path)
    return path


def _name(prefix: str, folder: str) -> str:
    return os.path.join(folder, f"{prefix}{secrets.token_hex(8)}")
