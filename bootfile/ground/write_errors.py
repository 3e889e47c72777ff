"""Explain why a file could not be written, with the free space if the disk may be full.

files.explain_write() imports this module when a write has failed.
"""

import contextlib
import errno
import os


def explain(error: Exception, path: str) -> str:
    """Return the reason of an error of the disk and the place: "No space left on device (12.0 MB free at
    FOLDER)", or "Permission denied (at FOLDER)": free space would not help there."""
    reason = str(error)
    number = errno.ENOSPC  # an error of torch may be one of a full disk
    if isinstance(error, OSError):
        reason = error.strerror or reason
        number = error.errno or number
    # the file or its folder may not exist yet: the free space is that of the nearest folder that does
    while not os.path.exists(path):
        path = os.path.dirname(path) or "."
    if number in (errno.EFBIG, errno.EDQUOT):
        return f"{reason} (a limit of the size of files, or a quota, at {path})"
    if number == errno.ENODEV:  # check_mounted() names the mount
        return reason
    if number != errno.ENOSPC:
        return f"{reason} (at {path})"
    with contextlib.suppress(OSError):  # a stale mount
        space = os.statvfs(path)
        is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        if is_full and space.f_files and not space.f_favail:  # some file systems do not count their files
            return f"{reason} (no free inodes at {path}: it has as many files as it can hold)"
        return f"{reason} ({space.f_bavail * space.f_frsize / 1e6:.1f} MB free at {path})"
    return reason
