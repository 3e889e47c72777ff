"""Data files that come from elsewhere: checked before they are believed, downloaded only over https."""

import contextlib
import fcntl
import gzip
import hashlib
import http.client
import os
import ssl
import urllib.error
import urllib.request

from tqdm import tqdm

from common.exits import BadInput
from common.files import ROOT, make_file
from common.object_store import store as object_store
from datasets import staging

_TIMEOUT = 20  # seconds without a byte
_BLOCK = 1 << 20


DEFAULT_FOLDER = os.path.join(ROOT, "input_dir")


def local_folder(data_url: str | None) -> str:
    """data_url as a folder of this machine; None is input_dir/ beside datasets/, which need not exist yet.

    What is below an s3:// or obs:// URL is fetched to the node's scratch disk (datasets/staging.py), and
    every process of the job waits until all nodes have it. Raises BadInput where that fails, for another
    URL and for a missing folder.
    """
    if data_url is None:
        return DEFAULT_FOLDER
    if object_store.is_url(data_url):
        return staging.stage(data_url)
    scheme, separator, _ = data_url.partition("://")
    if separator:
        raise BadInput(
            f"data_url {data_url} is a {scheme} URL, not s3:// or obs:// and not a folder: let the platform "
            "download it before the start (ModelArts: an input named data_url), and pass the folder"
        )
    if not os.path.isdir(data_url):
        raise BadInput(f"data_url {data_url} does not exist or is not a folder")
    return data_url


def read_checked(path: str, md5: str) -> bytes:
    """The file's bytes, unpacked if its name ends in .gz. md5: of the file as it stands. Raises BadInput."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    check_md5(path, content, md5)
    return gzip.decompress(content) if path.endswith(".gz") else content


def check_md5(name: str, content: bytes, md5: str) -> None:
    """Raises BadInput where the content is not the official one."""
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise BadInput(
            f"{name} is not the official file (truncated or changed): {len(content)} bytes with md5 {found}, "
            f"expected md5 {md5}"
        )


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request, response, code, message, headers, new_url):
        if not new_url.startswith("https://"):
            raise BadInput(f"{request.full_url} redirects to {new_url}, which is not https")
        return super().redirect_request(request, response, code, message, headers, new_url)


def download(url: str, path: str, md5: str) -> None:
    """Fetch an https URL to `path`, which appears only when it is whole and its md5 is right.

    A server that falls silent for 20 s ends it. Of several processes one fetches and the others wait for it.
    Raises BadInput with the reason; nothing is left behind then.
    """
    if not url.startswith("https://"):
        raise BadInput(f"{url} is not an https URL")
    folder = os.path.dirname(path)
    created = not os.path.isdir(folder)
    try:
        os.makedirs(folder, exist_ok=True)
        with _only_one(folder):
            if not os.path.exists(path):
                _fetch(url, path, md5)
    except BadInput:
        raise
    except urllib.error.URLError as error:
        raise BadInput(f"cannot download {url}: {error.reason}") from error
    except (
        OSError,
        ValueError,
        http.client.HTTPException,
    ) as error:  # time-outs, a cut connection, a full or read-only disk
        raise BadInput(f"cannot download {url} to {path}: {error or type(error).__name__}") from error
    finally:
        if created:
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # only if it is empty


@contextlib.contextmanager
def _only_one(folder: str):
    """Hold a lock on the folder itself, so that no lock file is left in the user's data."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(path: str):
    """Hold a lock on a file of our own that is made for it: also against other nodes, over NFS."""
    while True:
        with open(path, "a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            if is_at(file, path):  # else it was deleted by the process that had the lock
                yield
                return


def is_at(file, path: str) -> bool:
    """Whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _fetch(url: str, path: str, md5: str) -> None:
    opener = urllib.request.build_opener(
        _HttpsOnly, urllib.request.HTTPSHandler(context=ssl.create_default_context())
    )
    folder, name = os.path.split(path)
    with opener.open(url, timeout=_TIMEOUT) as response:
        size = int(response.headers.get("Content-Length") or 0)
        digest, received = hashlib.md5(usedforsecurity=False), 0
        handle, partial = make_file(f".{name}.", folder)
        try:
            with os.fdopen(handle, "wb") as file, _progress(name, size) as bar:
                while block := response.read(_BLOCK):
                    file.write(block)
                    digest.update(block)
                    received += len(block)
                    bar.update(len(block))
                file.flush()
                os.fsync(file.fileno())
            if digest.hexdigest() != md5:
                raise BadInput(
                    f"{url} sent {received} of {size or 'unknown'} bytes with md5 {digest.hexdigest()}, "
                    f"expected {md5}"
                )
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise


def _progress(name: str, size: int) -> tqdm:
    # Not a terminal: one line every 10 s, so that a slow download is not taken for a hang.
    return tqdm(
        total=size or None,
        unit="B",
        unit_scale=True,
        desc=f"downloading {name}",
        mininterval=10 * (not os.isatty(2)),
    )
