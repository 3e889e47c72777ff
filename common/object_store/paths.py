"""Check the keys of objects as paths of this node, and make scratch folders."""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable

from common.ground.exits import BadInput
from common.ground.files import PARTIAL
from common.object_store.errors import of_the_disk, shown
from common.object_store.location import find_endpoint, parse

SCRATCH = "BOOTFILE_SCRATCH"
_CACHE = "/cache"  # ModelArts' local disk


def check_keys(keys: Iterable[str], url: str) -> None:
    """Raise BadInput if a key is not a valid path of a file below a folder, or if two keys exclude each
    other: `a` and `a/b`. The error names the key."""
    keys, folders = set(keys), set()
    for key in keys:
        parts = key.split("/")
        if (
            {"", ".", ".."} & set(parts)
            or not key.isprintable()
            or "\\" in key
            or any(len(os.fsencode(part)) > 255 for part in parts)
            or len(os.fsencode(key)) > 3000
            or is_partial(parts[-1])
        ):
            raise BadInput(
                f"{url}: key {shown(key):.300} is not a valid path of a file: expected names of at most 255 "
                "bytes without a backslash or control character, not ., .. or that of an unfinished download"
            )
        folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
    for key in keys & folders:
        raise BadInput(f"{url}: key {shown(key)} is both a file and a folder of other keys")


def local_path(folder: str, key: str) -> str:
    """Return the path of a key below a folder. Raises BadInput, with the key, if the path is outside of the
    folder or is not valid on this node."""
    check_keys([key], folder)
    path = os.path.join(folder, key)
    inside = os.path.realpath(folder)
    if os.path.commonpath([inside, os.path.realpath(os.path.dirname(path))]) != inside:
        raise BadInput(f"key {shown(key)}: a link leads out of {folder}")
    return path


def is_partial(name: str) -> bool:
    """Return whether this is the name of the temporary file of an unfinished download."""
    return name.startswith(PARTIAL)


def make_folder_of(path: str, key: str) -> None:
    """Make the parent folders of a path. Raises BadInput if a file has the name of one of them."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise BadInput(f"key {shown(key)}: its folder is a file ({error.filename})") from error
    except OSError as error:
        raise of_the_disk(error, path) from error


def scratch_folder(kind: str, url: str) -> str:
    """Make this user's private folder for a URL on the node's scratch disk, and return its absolute path.

    A restart on the same node finds the same folder. It is below BOOTFILE_SCRATCH, else below /cache if that
    is writable, else below the system's temporary folder. kind: "staged" or "outputs". Raises BadInput if the
    URL is not valid or the folder is not writable.
    """
    location = parse(url)
    where = find_endpoint(location.scheme)
    digest = hashlib.sha256("\0".join([where.url or "", *location]).encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]+", "-", f"{location.bucket}-{location.prefix}".rstrip("-"))[-40:]
    own = os.path.join(scratch_place(), f"bootfile-{os.getuid()}")
    path = os.path.join(own, kind, f"{name}-{digest}")
    try:
        os.makedirs(own, mode=0o700, exist_ok=True)
        if os.path.islink(own) or os.lstat(own).st_uid != os.getuid():  # temporary folders are open to all
            raise BadInput(f"{own} belongs to another user: set {SCRATCH} to a folder of your own")
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot create scratch folder {path}: {error.strerror}; set {SCRATCH}") from error
    return path


def scratch_place() -> str:
    """Return the absolute path of the folder for scratch folders."""
    if named := os.environ.get(SCRATCH):
        return os.path.abspath(named)
    if os.path.isdir(_CACHE) and os.access(_CACHE, os.W_OK | os.X_OK):
        return _CACHE
    return os.path.abspath(tempfile.gettempdir())
