"""Find, download (only over https) and verify data files."""

import errno
import gzip
import hashlib
import http.client
import os
import urllib.request
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, open_atomic
from common.ground.files import HOME, is_url, locked

_TIMEOUT = 20  # seconds without a byte
_BLOCK = 1 << 20

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
    if line := describe_dead_link(path):
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


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    """A handler that follows redirects to https only."""

    def redirect_request(self, request: Any, *others: Any):
        """Return the next request. Raises BadInput."""
        if not others[-1].startswith("https://"):
            raise BadInput(f"{request.full_url} redirects to {others[-1]}, which is not https")
        return super().redirect_request(request, *others)


def download(url: str, path: str, md5: str) -> None:
    """Download an https URL to `path`. The file appears only when it is complete and has the md5. Of several
    processes one downloads and the others wait. Raises BadInput with the reason, for example if the server
    sends nothing for 20 s, and leaves no files then."""
    if not url.startswith("https://"):
        raise BadInput(f"{url} is not an https URL")
    folder = os.path.dirname(path)
    # errors of the network or the disk
    with explained(f"cannot download {url} to {path}", ValueError, http.client.HTTPException):
        os.makedirs(folder, exist_ok=True)
        with locked(folder):
            if not os.path.exists(path):
                _fetch(url, path, md5)


def _fetch(url: str, path: str, md5: str) -> None:
    """Download a file and check it. Raises BadInput and errors of the network."""
    opener = urllib.request.build_opener(_HttpsOnly)
    with opener.open(url, timeout=_TIMEOUT) as response, open_atomic(path) as file:
        size = int(response.headers.get("Content-Length") or 0)
        digest = hashlib.md5(usedforsecurity=False)
        received = 0
        # not a terminal: print every 10 s, so that a slow download does not look like a hang
        interval = 0.1 if os.isatty(2) else 10
        title = f"downloading {os.path.basename(path)}"
        with tqdm(total=size or None, unit="B", unit_scale=True, desc=title, mininterval=interval) as bar:
            while True:
                block = response.read(_BLOCK)
                if not block:
                    break
                file.write(block)
                digest.update(block)
                received += len(block)
                bar.update(len(block))
        if digest.hexdigest() != md5:
            raise BadInput(
                f"{url} sent {received} of {size or 'unknown'} bytes with md5 {digest.hexdigest()}, "
                f"expected {md5}"
            )
