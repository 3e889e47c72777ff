"""Find and verify data files. downloads.py gets those that are missing."""

import errno
import gzip
import hashlib
import os
from collections.abc import Iterable

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained
from common.ground.files import HOME, is_url

CACHE_FOLDER = os.path.expanduser(os.path.join("~", ".cache", "bootfile"))  # indexes, outside of a job
DEFAULT_FOLDER = os.path.join(HOME, "input_dir")


def local_folder(data_url: str | None) -> str:
    """Return data_url as a local folder. None: the repository's input_dir/, which need not exist yet. Objects
    below an s3:// or obs:// URL are copied to the node's scratch disk (datasets/staging.py). Every process of
    the job waits until all nodes have them. Raises BadInput if that fails, for another URL and for a missing
    folder."""
    if data_url is None:
        return DEFAULT_FOLDER
    if is_url(data_url):
        from datasets import staging  # imports the object store's code, which folders do not need

        return staging.stage(data_url)
    scheme, separator, _ = data_url.partition("://")
    if separator:
        raise BadInput(
            f"data_url {data_url} is a {scheme} URL; expected a folder, s3:// or obs://: let the platform "
            "download it before the start (ModelArts: an input named data_url), and pass the folder"
        )
    from bootfile.ground.again import is_folder  # the default folder needs no look

    if not is_folder(data_url):
        reason = describe_dead_link(data_url) or f"{data_url} does not exist or is not a folder"
        raise BadInput(f"data_url {reason}")
    return data_url


def describe_dead_link(path: str) -> str:
    """Return "LINK is a link to TARGET, which does not exist" for the first link on a path that leads
    nowhere. "" if there is none. A walk over folders sees a link whose disk is not mounted as a file: a class
    behind one would be left out, and the classes after it would get other numbers."""
    parts = os.path.abspath(path).split("/")
    paths = ("/".join(parts[:count]) for count in range(2, len(parts) + 1))
    for link in filter(os.path.islink, paths):  # from the root on: the first one is the reason
        try:
            os.stat(link)
        except OSError as error:
            is_missing = error.errno == errno.ENOENT
            reason = "does not exist" if is_missing else f"cannot be opened ({error.strerror})"
            return f"{link} is a link to {os.readlink(link)}, which {reason}"
    return ""


def describe_dead_links(paths: Iterable[str]) -> str:
    """Return "; " and describe_dead_link() of the first of these paths that has one, for the end of a
    message; "" without one."""
    return next((f"; {line}" for line in map(describe_dead_link, paths) if line), "")


def refuse_dead_link(path: str) -> None:
    """Raise BadInput if a link on a path leads nowhere."""
    line = describe_dead_link(path)
    if line:
        raise BadInput(f"{line}: mount its disk, or correct or delete the link")


def read_checked(path: str, md5: str) -> bytes:
    """Return a file's bytes, unpacked if its name ends in .gz. md5: of the packed file. Data sets in memory
    call it on every rank. Raises BadInput."""
    from bootfile.ground.again import read_whole  # data sets that are generated need none

    with explained(f"cannot read {path}"):
        content = read_whole(path)
    actual = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if actual != md5:
        raise BadInput(
            f"{path} is not the official file (truncated or changed): "
            f"{len(content)} bytes with md5 {actual}, expected md5 {md5}"
        )
    return gzip.decompress(content) if path.endswith(".gz") else content
