"""Find and verify data files. downloads.py gets those that are missing."""

import gzip
import hashlib
import os

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
        from datasets.dead_links import describe_dead_link  # only a refusal needs it

        reason = describe_dead_link(data_url) or f"{data_url} does not exist or is not a folder"
        raise BadInput(f"data_url {reason}")
    return data_url


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
