"""Object stores, S3 and Huawei's OBS: what is below a URL, whole or refused by name.

    store = ObjectStore("obs://bucket/folder")
    for entry in store.list():
        store.fetch(entry.key, path, entry.size)

Keys are relative to the URL. Every byte is counted, files are compared with the sha256 that stands in their
metadata, and what fails is tried again a bounded number of times; boto3 alone lets flipped bits through and
gives a body up that was cut. Every error is one line that names the bucket, the key and the cause.

The environment says where (common/object_store/client.py) and who (AWS_*, OBS_*, or boto3's usual files).
BOOTFILE_STORE_ATTEMPTS (default 5) and BOOTFILE_STORE_TIMEOUT (seconds without a byte, default 30) bound the
waiting.
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

_PAGE = 1000  # keys of an answer, the most that stores give
_Uploads = list[tuple[str, str, float]]  # key, upload id, seconds since 1970
_Progress = Callable[[int], object] | None


class Object(NamedTuple):
    """What is stored under a key (relative to the URL). size in bytes, modified in seconds since 1970;
    sha256: of the metadata, as hex, None in listings and where there is none."""

    key: str
    size: int
    etag: str
    modified: float
    sha256: str | None = None


class ObjectStore:
    """What is below one URL. All methods may be called from several threads; it can be pickled, and survives
    a fork. Nothing is connected before the first call. Raises BadInput; its methods, StoreError.

    threads: requests at a time for the parts of big files.
    """

    def __init__(self, url: str, threads: int = 16):
        self.location = parse(url)
        self.requests = Requests(self.location, threads)

    def list(self, prefix: str = "") -> Iterator[Object]:
        """Yield all objects below URL/prefix, by key, without the empty ones that stand for folders."""
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
        """Yield the names of the folders directly below the URL, without listing what is in them."""
        below = self.location.full("")
        for page in self._pages("", Prefix=below, Delimiter="/"):
            for each in page.get("CommonPrefixes", []):
                yield each["Prefix"][len(below) : -1]

    def _pages(self, key: str, **parameters) -> Iterator[dict]:
        """Pages of a listing. Not ListObjectsV2: stores that do not know it end silently after 1,000."""
        marker = ""
        while True:
            page = self.requests.call("list_objects", key, Marker=marker, MaxKeys=_PAGE, **parameters)
            yield page
            last = [each["Key"] for each in page.get("Contents", [])[-1:]]
            last += [each["Prefix"] for each in page.get("CommonPrefixes", [])[-1:]]
            if not page.get("IsTruncated") or not last:
                return
            marker = max(last)

    def head(self, key: str) -> Object | None:
        """One object, with the sha256 of its metadata; None if it is not there."""
        try:
            answer = self.requests.call("head_object", key, Key=self.location.full(key))
        except StoreError as error:
            if error.reason in ("404", "NoSuchKey", "NotFound"):
                return None
            raise
        facts = read_facts(answer)
        return Object(key, facts.size, facts.etag, answer["LastModified"].timestamp(), facts.sha256)

    def read(self, key: str, first: int = 0, size: int | None = None) -> bytes:
        """`size` bytes from byte `first` on, fewer at the end of the object. An object as a whole (no size)
        is compared with its sha256; of a range, only the length can be."""
        if size == 0:
            return b""
        if first == 0 and size is None:
            return self.requests.read_object(key)[0]
        return self.requests.read_range(key, first, size)

    def fetch(
        self, key: str, path: str, size: int, sha256: str | None = None, progress: _Progress = None
    ) -> str:
        """Make an object the file `path`, whole; its sha256.

        It appears when its length and its sha256 (this one, or the metadata's; without either, the MD5 of its
        ETag) are right and it is on the disk. Until then its bytes are in a hidden file beside it; the next
        call goes on with that of a big file. progress(bytes): less than 0 where bytes have to come again. The
        folder must exist.
        """
        return transfer.fetch(self.requests, key, path, size, sha256, progress or _nothing)

    def send(self, path: str, key: str, progress: _Progress = None, sha256: str | None = None) -> str:
        """Store a file under a key, with its sha256 as metadata; the sha256.

        sha256: what the file must have. A file that changes meanwhile is refused. Big files go in parts,
        which are taken back when they do not come to an end.
        """
        return transfer.send(self, path, key, sha256, progress or _nothing)

    def write(self, key: str, content: bytes) -> None:
        """Store a few bytes under a key."""
        self.requests.put(key, content, hashlib.sha256(content).hexdigest())

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; one that is not there counts as removed."""

        def remove(key: str) -> None:
            self.requests.call("delete_object", key, Key=self.location.full(key))

        # One by one: with many at a time boto3 sends a checksum that OBS does not know.
        for _ in self.requests.pool.map(remove, keys):
            pass

    def uploads(self, key: str | None = None) -> _Uploads:
        """(key, upload id, seconds since 1970) of unfinished multipart uploads: all, or those of one key."""
        prefix, skip = self.location.full(key or ""), len(self.location.full(""))
        found, markers = [], {}
        while True:
            page = self.requests.call("list_multipart_uploads", key or "", Prefix=prefix, **markers)
            for each in page.get("Uploads", []):
                if key is None or each["Key"] == prefix:
                    found.append((each["Key"][skip:], each["UploadId"], each["Initiated"].timestamp()))
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                return found
            markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abort(self, key: str, upload_id: str) -> None:
        """Take an unfinished multipart upload back; one that is not there counts as taken back."""
        try:
            self.requests.call("abort_multipart_upload", key, Key=self.location.full(key), UploadId=upload_id)
        except StoreError as error:
            if error.reason not in ("NoSuchUpload", "404"):
                raise

    def stop(self) -> None:
        """Make the calls of all threads end with a StoreError soon, for good: after Ctrl-C."""
        self.requests.stopped.set()

    def close(self) -> None:
        """Let connections and threads go. The store may be used again."""
        self.requests.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _nothing(count: int) -> None:
    pass
