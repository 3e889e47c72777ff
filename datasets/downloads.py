"""Download data files, only over https. Only a data set that can be downloaded loads this module."""

import hashlib
import http.client
import os
import urllib.request
from typing import Any

from tqdm import tqdm

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, open_atomic
from common.ground.shared_folders import locked

_TIMEOUT = 20  # seconds without a byte
_BLOCK = 1 << 20


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
