"""What follows an error of a file: it is read again if its mount may answer in a moment, or the error is
explained. files.py imports this module when a read or a write has failed.
"""

import contextlib
import errno
import functools
import os
import stat
import time
from collections.abc import Callable
from typing import TypeVar

from bootfile.ground.errors import BadInput, Once, Unavailable, in_one_line, print_line

T = TypeVar("T")
PAUSES: tuple[float, ...] = (0.2, 1.0, 4.0)  # seconds before a file is read again
_RECOVERY = 60.0  # seconds after which a mount that was lost is waited for again
# Errors of a network mount, or of a disk, that may pass in a moment. Not every system has all of them.
_TEMPORARY = (
    "ESTALE EIO EAGAIN EINTR ETIMEDOUT ETIME ECONNRESET ECONNABORTED ENOTCONN ESHUTDOWN ENETDOWN ENETUNREACH "
    "ENETRESET EHOSTDOWN EHOSTUNREACH EREMOTEIO ENOLINK ECOMM EPROTO ENOBUFS"
)
_NUMBERS = {getattr(errno, name, None) for name in _TEMPORARY.split()} - {None}

_warn_once = Once(print_line)
_lost_since: float | None = None  # when a read failed after all PAUSES; None: later ones have succeeded


def is_temporary(error: BaseException | None) -> bool:
    """Return whether an error, or one that has caused it, is of a file system that may answer in a moment."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NUMBERS:
            return True
        error = error.__cause__
    return False


def refusal(text: str, error: BaseException) -> BadInput:
    """Return the BadInput for an error of a file: an Unavailable, if its file system may answer later."""
    if is_temporary(error):
        return Unavailable(f"{text}: start it again when the file system answers")
    return BadInput(text + _explain_link(error))


def _explain_link(error: BaseException) -> str:
    """Return ": FILE is a link to PLACE, which does not exist" if that is the cause of an error; else ""."""
    if not isinstance(error, FileNotFoundError | FileExistsError):
        return ""
    path = getattr(error, "filename", None)
    while isinstance(path, str) and path.strip("/"):
        if os.path.islink(path) and not os.path.exists(path):
            return f": {path} is a link to {os.readlink(path)}, which does not exist"
        path = os.path.dirname(path)
    return ""


def repeat(read: Callable[[], T], path: str, error: Exception) -> T:
    """Return read() of a file, which has raised an error. Raise that error if it does not pass.

    The first repetition of a process is printed. If a read fails after all PAUSES, the next ones are repeated
    without a pause until one succeeds: a thousand files would wait for a mount that is gone.
    """
    global _lost_since
    if not is_temporary(error):
        raise error
    reason = error.strerror if isinstance(error, OSError) else str(error)
    _warn_once(
        f"warning: {path}: {reason}: it is read again, and so are others that fail so from now on",
        "read again",
    )
    # a mount that was lost a moment ago gets one more try, without a pause
    is_lost = _lost_since is not None and time.monotonic() - _lost_since < _RECOVERY
    for pause in (0.0,) if is_lost else PAUSES:
        time.sleep(pause)
        try:
            value = read()
        except Exception as failure:
            if not is_temporary(failure):
                raise
            error = failure
        else:
            _lost_since = None
            return value
    _lost_since = time.monotonic()
    raise error


def read_whole(path: str, opener: Callable[[str, int], int] | None = None) -> bytes:
    """Return the content of a file. opener: as of open(). Raises OSError."""

    def read() -> bytes:
        with open(path, "rb", buffering=0, opener=opener) as file:
            return file.read()

    try:
        return read()
    except OSError as error:
        return repeat(read, path, error)


def mode_of(path: str) -> int | None:
    """Return the st_mode of a file or folder; None if it is missing or may not be looked at. Raises
    Unavailable if a mount does not answer: os.path.isdir() returns False then, as for a missing folder."""
    look = functools.partial(os.stat, path)
    try:
        try:
            return look().st_mode
        except OSError as error:
            return repeat(look, path, error).st_mode  # it raises an error that does not pass
    except (OSError, ValueError) as error:
        if is_temporary(error):
            raise refusal(f"cannot read {path}: {in_one_line(error)}", error) from error
        return None


def is_folder(path: str) -> bool:
    """Return whether a folder exists, as os.path.isdir(). Raises Unavailable."""
    mode = mode_of(path)
    return mode is not None and stat.S_ISDIR(mode)


def is_file(path: str) -> bool:
    """Return whether a file exists, as os.path.isfile(). Raises Unavailable."""
    mode = mode_of(path)
    return mode is not None and stat.S_ISREG(mode)


def explain_write(error: Exception, path: str) -> str:
    """Return the reason of an error of the disk and the place: "No space left on device (12.0 MB free at
    FOLDER)", or "Permission denied (at FOLDER)": free space would not help there."""
    reason = str(error)
    number: int | None = errno.ENOSPC  # an error of torch may be one of a full disk
    if isinstance(error, OSError):
        reason = error.strerror or reason
        number = error.errno
    if number == errno.ENODEV:  # check_mounted() names the mount
        return reason
    # the file or its folder may not exist yet: the free space is that of the nearest folder that does
    while not os.path.exists(path):
        path = os.path.dirname(path) or "."
    if number in (errno.EFBIG, errno.EDQUOT):
        return f"{reason} (a limit of the size of files, or a quota, at {path})"
    if number == errno.ENOSPC:
        with contextlib.suppress(OSError):  # a stale mount
            space = os.statvfs(path)
            if space.f_files and not space.f_favail:  # some file systems do not count their files
                return f"{reason} (no free inodes at {path}: it has as many files as it can hold)"
            return f"{reason} ({space.f_bavail * space.f_frsize / 1e6:.1f} MB free at {path})"
    return f"{reason} (at {path})"
