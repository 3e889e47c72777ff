"""A folder for the sockets of multiprocessing, if the path of TMPDIR is too long for them."""

import contextlib
import multiprocessing
import os
import stat
import tempfile

from bootfile.ground.errors import BadInput

LONGEST = 103  # bytes of a socket's path: 107 on Linux, 103 on macOS
# what multiprocessing adds to TMPDIR: a folder, which it then has in its settings, and a file
_FOLDER = "/pymp-12345678"
_FILE = "/listener-12345678"
_PLACES = ("/tmp", "/var/tmp", "/dev/shm")


def find_short_folder() -> None:
    """Let the sockets of multiprocessing be made in a short folder, if their paths in TMPDIR would be too
    long. Raises BadInput if there is none.

    A process calls it before it starts workers, which inherit the folder. It stays after the job: each job of
    the user takes the same one.
    """
    # the sockets fail when a batch is sent, with a line that does not name TMPDIR: so it is checked before.
    # multiprocessing.util.get_temp_dir() reads the folder from these settings
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    folder = settings.get("tempdir") or tempfile.gettempdir() + _FOLDER
    if len(os.fsencode(folder + _FILE)) <= LONGEST:
        return
    for place in _PLACES:
        short = f"{place}/bootfile-{os.geteuid()}"
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                os.mkdir(short, 0o700)
            # any user may make a folder in /tmp: only this user's own is used, into which no other one writes
            status = os.lstat(short)
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_own and not status.st_mode & 0o022 and os.access(short, os.W_OK):
                settings["tempdir"] = short
                return
    raise BadInput(explain_long_folder(tempfile.gettempdir()))


def explain_long_folder(folder: str) -> str:
    """Return one line on a folder in which no socket can be made."""
    length = len(os.fsencode(folder))
    return (
        f"TMPDIR={folder} has {length} bytes, and a socket there may have a path of {LONGEST}: set a "
        f"TMPDIR of at most {LONGEST - len(_FOLDER + _FILE)} bytes"
    )
