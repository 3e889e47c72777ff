"""Folders on the node's scratch disk that belong to a URL: a restart in place finds its own again."""

import hashlib
import os
import re
import tempfile

from common.exits import BadInput
from common.object_store import client as object_store_client
from common.object_store import store as object_store

PLACE = "BOOTFILE_SCRATCH"
_PLATFORM = "/cache"  # ModelArts' local disk


def folder(kind: str, url: str) -> str:
    """The absolute path of this user's folder for a URL, made, and closed to others.

    It lies below BOOTFILE_SCRATCH, else /cache where that can be written, else the system's temporary folder.
    kind: "staged" or "outputs". Raises BadInput for a URL that is none, and where nothing can be written.
    """
    location = object_store.parse(url)
    where = object_store_client.endpoint(location.scheme)
    digest = hashlib.sha256("\0".join([where.url or "", *location]).encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]+", "-", f"{location.bucket}-{location.prefix}".rstrip("-"))[-40:]
    own = os.path.join(place(), f"bootfile-{os.getuid()}")
    path = os.path.join(own, kind, f"{name}-{digest}")
    try:
        os.makedirs(own, mode=0o700, exist_ok=True)
        if os.path.islink(own) or os.lstat(own).st_uid != os.getuid():  # temporary folders are open to all
            raise BadInput(f"{own} belongs to somebody else: set {PLACE} to a folder of your own")
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise BadInput(f"no scratch folder at {path}: {error.strerror}; set {PLACE}") from error
    return path


def place() -> str:
    """Absolute."""
    if named := os.environ.get(PLACE):
        return os.path.abspath(named)
    if os.path.isdir(_PLATFORM) and os.access(_PLATFORM, os.W_OK | os.X_OK):
        return _PLATFORM
    return os.path.abspath(tempfile.gettempdir())
