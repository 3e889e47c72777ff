"""Read, write and list the objects below a URL of an object store: S3 or Huawei's OBS.

    store = ObjectStore("obs://bucket/folder")
    for entry in store.list():
        store.fetch(entry.key, path, entry.size)

Keys are relative to the URL. The length of every object is checked, and its content is compared with the
sha256 in its metadata. Failed requests are retried a limited number of times. boto3 alone neither detects
corrupted downloads nor retries truncated ones. Every error is one line with bucket, key and cause.

The environment gives the endpoint (location.py) and the credentials (AWS_*, OBS_*, or boto3's usual files).
BOOTFILE_STORE_ATTEMPTS (default 5) and BOOTFILE_STORE_TIMEOUT (seconds without a byte, default 30) limit the
waiting time.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from common.files import is_url
from common.object_store import transfer
from common.object_store.client import read_facts
from common.object_store.errors import StoreError
from common.object_store.location import parse
from common.object_store.requests import Requests

__all__ = ["Object", "ObjectStore", "StoreError", "is_url", "parse"]

_PAGE, _MOST_PAGES = 1000, 10**5  # keys in an answer (stores return no more), answers to one listing
MISSING = ("404", "NoSuchKey", "NotFound")  # reasons of a StoreError: no such object
_Uploads = list[tuple[str, str, float]]  # key, upload id, seconds since 1970
_Progress = Callable[[int], object] | None


class Object(NamedTuple):
    """An object, with its key relative to the URL. size in bytes, modified in seconds since 1970; sha256 in
    hex from the metadata, None in listings and if the metadata has none."""

    key: str
    size: int
    etag: str
    modified: float
    sha256: str | None = None


class ObjectStore:
    """The objects below one URL.

    All methods may be called from several threads. It can be pickled, and survives a fork. It connects at the
    first call. threads: the number of concurrent requests for the parts of big files. Raises BadInput; its
    methods raise StoreError.
    """

    def __init__(self, url: str, threads: int = 16):
        self.location = parse(url)
        self.requests = Requests(self.location, threads)

    def list(self, prefix: str = "") -> Iterator[Object]:
        """Yield all objects below URL/prefix, by key, without the empty objects that represent folders."""
        skip = len(self.location.full(""))
        folder = prefix.strip("/")
        for page in self._pages(prefix, Prefix=self.location.full(f"{folder}/" if folder else "")):
            for entry in page.get("Contents", []):
                if not (entry["Key"].endswith("/") and entry["Size"] == 0):
                    yield Object(
                        entry["Key"][skip:], entry["Size"], entry["ETag"].strip('"'),
                        entry["LastModified"].timestamp(),
                    )  # fmt: skip

    def folders(self) -> Iterator[str]:
        """Yield the names of the folders directly below the URL, without listing their content."""
        below = self.location.full("")
        for page in self._pages("", Prefix=below, Delimiter="/"):
            for each in page.get("CommonPrefixes", []):
                yield each["Prefix"][len(below) : -1]

    def _pages(self, key: str, **parameters) -> Iterator[dict]:
        """Yield the pages of a listing. Not ListObjectsV2: stores without it stop silently at 1,000 keys."""
        marker = ""
        for _ in range(_MOST_PAGES):
            page = self.requests.call("list_objects", key, Marker=marker, MaxKeys=_PAGE, **parameters)
            yield page
            last = [each["Key"] for each in page.get("Contents", [])[-1:]]
            last += [each["Prefix"] for each in page.get("CommonPrefixes", [])[-1:]]
            if not page.get("IsTruncated") or not last:
                return
            if max(last) <= marker:
                break
            marker = max(last)
        raise StoreError(f"{self.location.url(key)}: the listing does not end", "listing")

    def head(self, key: str) -> Object | None:
        """Return an object, with the sha256 of its metadata; None if it does not exist."""
        try:
            answer = self.requests.call("head_object", key, Key=self.location.full(key))
        except StoreError as error:
            if error.reason in MISSING:
                return None
            raise
        facts = read_facts(answer)
        return Object(key, facts.size, facts.etag, answer["LastModified"].timestamp(), facts.sha256)

    def read(self, key: str, first: int = 0, size: int | None = None) -> bytes:
        """Return `size` bytes from byte `first`, fewer at the end of the object; without size, up to the end.
        A whole object is compared with its sha256. For a range only the length is checked."""
        if size == 0:
            return b""
        if first == 0 and size is None:
            return self.requests.read_object(key)[0]
        return self.requests.read_range(key, first, size)

    def read_version(self, key: str) -> tuple[bytes, str | None]:
        """Return the bytes of a whole object, and its ETag for replace(): None if there is no object."""
        try:
            content, facts = self.requests.read_object(key)
            return content, facts.etag
        except StoreError as error:
            if error.reason in MISSING:
                return b"", None
            raise

    def fetch(
        self, key: str, path: str, size: int, sha256: str | None = None, progress: _Progress = None
    ) -> str:
        """Download an object to the file `path`, atomically. Return its sha256. The folder must exist.

        Until the download is complete, its bytes are in a hidden file in the same folder. The next call
        continues with the hidden file of a big object.

        size: the expected length in bytes.
        sha256: the expected sha256. Default: the one in the metadata; without it the MD5 in the ETag is used.
        progress: called with the number of new bytes; negative if bytes must be downloaded again.
        """
        return transfer.fetch(self.requests, key, path, size, sha256, progress or _nothing)

    def send(self, path: str, key: str, progress: _Progress = None, sha256: str | None = None) -> str:
        """Upload a file, with its sha256 as metadata. Return the sha256.

        sha256: the expected sha256 of the file. A file that changes during the upload is refused. Big files
        are sent in parts, which are deleted if the upload fails.
        """
        return transfer.send(self, path, key, sha256, progress or _nothing)

    def write(self, key: str, content: bytes, **condition: str) -> str:
        """Store a few bytes under a key, and return the ETag. condition: IfMatch or IfNoneMatch."""
        return self.requests.put(key, content, hashlib.sha256(content).hexdigest(), **condition).strip('"')

    def replace(self, key: str, content: bytes, etag: str | None) -> str | None:
        """Store a few bytes under a key if the object has this ETag (None: if there is no object). Return the
        new ETag; None if the object is another one. A store without conditional writes always replaces it."""
        try:
            return self.write(key, content, **({"IfMatch": etag} if etag else {"IfNoneMatch": "*"}))
        except StoreError as error:
            if error.reason == "NotImplemented":
                return self.write(key, content)
            if error.reason in (*MISSING, "412", "PreconditionFailed"):
                return None
            raise

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. A missing object is not an error."""

        def remove(key: str) -> None:
            self.requests.call("delete_object", key, Key=self.location.full(key))

        # One request for each key: for a multi-object delete boto3 sends a checksum that OBS does not know.
        for _ in self.requests.pool.map(remove, keys):
            pass

    def uploads(self, key: str | None = None) -> _Uploads:
        """Return (key, upload id, seconds since 1970) of unfinished multipart uploads: of a key, or all."""
        prefix, skip = self.location.full(key or ""), len(self.location.full(""))
        found, markers = [], {}
        for _ in range(_MOST_PAGES):
            page = self.requests.call("list_multipart_uploads", key or "", Prefix=prefix, **markers)
            for each in page.get("Uploads", []):
                if key is None or each["Key"] == prefix:
                    found.append((each["Key"][skip:], each["UploadId"], each["Initiated"].timestamp()))
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                return found
            before, upload = markers, page.get("NextUploadIdMarker", "")
            markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": upload}
            if markers == before or (before and markers["KeyMarker"] < before["KeyMarker"]):
                break
        raise StoreError(f"{self.location.url(key or '')}: the listing does not end", "listing")

    def abort(self, key: str, upload_id: str) -> None:
        """Abort an unfinished multipart upload. A missing upload is not an error."""
        try:
            self.requests.call("abort_multipart_upload", key, Key=self.location.full(key), UploadId=upload_id)
        except StoreError as error:
            if error.reason not in ("NoSuchUpload", "404"):
                raise

    def stop(self) -> None:
        """Make the current and later calls of all threads end soon with a StoreError, after Ctrl-C."""
        self.requests.stopped.set()

    def close(self) -> None:
        """Close the connections and end the threads. The store may be used again."""
        self.requests.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _nothing(count: int) -> None:
    pass
