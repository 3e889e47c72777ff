"""Check the keys of objects as paths of this node, and make scratch folders."""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable

from bootfile.ground.errors import BadInput, printable
from bootfile.ground.files import PARTIAL, explained
from common.object_store.errors import of_the_disk
from common.object_store.location import find_endpoint, parse

SCRATCH = "BOOTFILE_SCRATCH"
_CACHE = "/cache"  # ModelArts' local disk


def check_keys(keys: Iterable[str], url: str) -> None:
    """Raise BadInput if a key is not a valid path of a file below a folder, or if two keys exclude each
    other: `a` and `a/b`. The error names the key. It is called before a transfer begins: a key of another
    program could otherwise lead to a file outside of the folder."""
    keys = set(keys)
    folders: set[str] = set()
    for key in keys:
        parts = key.split("/")
        if (
            {"", ".", ".."} & set(parts)
            or not key.isprintable()
            or "\\" in key
            or any(len(os.fsencode(part)) > 255 for part in parts)
            or len(os.fsencode(key)) > 3000
            or parts[-1].startswith(PARTIAL)
        ):
            raise BadInput(
                f"{url}: key {printable(key):.300} is not a valid path of a file: expected names of at most "
                "255 bytes without a backslash or control character, not ., .. or that of an unfinished "
                "download"
            )
        # the folders that this key needs: no other key may be a file of that name
        folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
    for key in keys & folders:
        raise BadInput(f"{url}: key {printable(key)} is both a file and a folder of other keys")


def make_path(folder: str, key: str) -> str:
    """Make the parent folders of a key's file below a folder, and return its path. Check the key before.
    Raises BadInput if a file has the name of a parent folder, or if a link leads out of the folder."""
    path = os.path.join(folder, key)
    inside = os.path.realpath(folder)
    parent = os.path.dirname(path)
    # before the folders are made: one of them may be a link that another program has put there
    if os.path.commonpath([inside, os.path.realpath(parent)]) != inside:
        raise BadInput(f"key {printable(key)}: a link leads out of {folder}")
    try:
        os.makedirs(parent, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise BadInput(f"key {printable(key)}: its folder is a file ({error.filename})") from error
    except OSError as error:
        raise of_the_disk(error, path) from error
    return path


def scratch_folder(kind: str, url: str) -> str:
    """Make this user's private folder for a URL on the node's scratch disk, and return its absolute path. A
    restart on the same node finds the same folder. It is below BOOTFILE_SCRATCH, else below /cache if that is
    writable, else below the system's temporary folder. kind: "staged" or "outputs". Raises BadInput if the
    URL is not valid or the folder is not writable."""
    location = parse(url)
    where = find_endpoint(location.scheme)
    # from the server and the URL: the same bucket name at two servers gives two folders
    digest = hashlib.sha256("\0".join([where.url or "", *location]).encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]+", "-", f"{location.bucket}-{location.prefix}".rstrip("-"))[-40:]
    place = os.path.expanduser(os.environ.get(SCRATCH, ""))
    if not place:
        place = tempfile.gettempdir()
        if os.path.isdir(_CACHE) and os.access(_CACHE, os.W_OK | os.X_OK):
            place = _CACHE
    of_user = os.path.join(os.path.abspath(place), f"bootfile-{os.getuid()}")
    path = os.path.join(of_user, kind, f"{name}-{digest}")
    with explained(f"cannot create scratch folder {path} (set {SCRATCH} to another place)"):
        os.makedirs(of_user, mode=0o700, exist_ok=True)
        # temporary folders are open to all users
        if os.path.islink(of_user) or os.lstat(of_user).st_uid != os.getuid():
            raise BadInput(f"{of_user} belongs to another user: set {SCRATCH} to a folder of your own")
        os.makedirs(path, mode=0o700, exist_ok=True)
    return path
