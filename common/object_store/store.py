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
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from common.exits import BadInput
from common.object_store import transfer as object_store_files
from common.object_store.answers import facts_of
from common.object_store.errors import StoreError, shown
from common.object_store.requests import Location, Requests

__all__ = ["Location", "Object", "ObjectStore", "StoreError", "is_url", "parse"]

_URL = re.compile(r"(s3|obs)://([^/]*)/?(.*)", re.DOTALL)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
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


def is_url(text) -> bool:
    """Whether this names something in an object store."""
    return isinstance(text, str) and text.startswith(("s3://", "obs://"))


def parse(url: str) -> Location:
    """Take s3://bucket[/prefix] or obs://bucket[/prefix] apart. Raises BadInput, without a password in it."""
    match = _URL.fullmatch(url)
    if not match:
        raise BadInput(f"{shown(url.rpartition('@')[2])} is no s3://bucket/prefix or obs://bucket/prefix")
    scheme, bucket, prefix = match.groups()
    if "@" in bucket:
        raise BadInput(
            f"a {scheme}:// URL holds a user name or a password: credentials have variables of their own"
        )
    if "." in bucket:
        raise BadInput(
            f"bucket {shown(bucket)}: a name with dots has no certificate in virtual addressing, which OBS "
            "insists on: use a bucket without dots"
        )
    if not bucket:
        raise BadInput(f"{shown(url)} names no bucket")
    if not _BUCKET.fullmatch(bucket):
        raise BadInput(f"{shown(url)}: {shown(bucket)} is no bucket's name (3 to 63 of a-z, 0-9 and -)")
    prefix = prefix.strip("/")
    if (prefix and {"", ".", ".."} & set(prefix.split("/"))) or not prefix.isprintable():
        raise BadInput(f"{shown(url)}: the prefix holds an empty part, . or .., or a control character")
    return Location(scheme, bucket, prefix)


class ObjectStore:
    """What is below one URL. All methods may be called from several threads; it can be pickled, and survives
    a fork. Nothing is connected before the first call. Raises BadInput; its methods, StoreError.

    threads: requests at a time for the parts of big files.
    """

    def __init__(self, url: str, threads: int = 16):
        self.location = parse(url)
        self.requests = Requests(self.location, threads)

    def list(self, prefix: str = "") -> Iterator[Object]:
        """All objects below URL/prefix, by key; without the empty ones that consoles make for folders."""
        skip = len(self.location.full(""))
        folder = prefix.strip("/")
        below, marker = self.location.full(f"{folder}/" if folder else ""), ""
        while True:  # not ListObjectsV2: a store that does not know it would end after 1,000, silently
            page = self.requests.call("list_objects", prefix, Prefix=below, Marker=marker, MaxKeys=_PAGE)
            entries = page.get("Contents", [])
            for entry in entries:
                if not (entry["Key"].endswith("/") and entry["Size"] == 0):
                    yield Object(
                        entry["Key"][skip:], entry["Size"], entry["ETag"].strip('"'),
                        entry["LastModified"].timestamp(),
                    )  # fmt: skip
            if not page.get("IsTruncated") or not entries:
                return
            marker = entries[-1]["Key"]

    def folders(self) -> Iterator[str]:
        """The names of the folders directly below the URL, without looking into them."""
        below = self.location.full("")
        marker = ""
        while True:
            page = self.requests.call(
                "list_objects", "", Prefix=below, Delimiter="/", Marker=marker, MaxKeys=_PAGE
            )
            found = [each["Prefix"] for each in page.get("CommonPrefixes", [])]
            for prefix in found:
                yield prefix[len(below) : -1]
            marker = max([*found, *(entry["Key"] for entry in page.get("Contents", []))], default="")
            if not page.get("IsTruncated") or not marker:
                return

    def head(self, key: str) -> Object | None:
        """One object, with the sha256 of its metadata; None if it is not there."""
        try:
            answer = self.requests.call("head_object", key, Key=self.location.full(key))
        except StoreError as error:
            if error.reason in ("404", "NoSuchKey", "NotFound"):
                return None
            raise
        facts = facts_of(answer)
        return Object(key, facts.size, facts.etag, answer["LastModified"].timestamp(), facts.sha256)

    def read(self, key: str, first: int = 0, size: int | None = None) -> bytes:
        """`size` bytes from byte `first` on, fewer at the end of the object. An object as a whole (no size)
        is compared with its sha256; of a range, only the length can be."""
        if size == 0:
            return b""
        if first == 0 and size is None:
            return self.requests.whole(key)[0]
        return self.requests.ranged(key, first, size)

    def fetch(
        self, key: str, path: str, size: int, sha256: str | None = None, progress: _Progress = None
    ) -> str:
        """Make an object the file `path`, whole; its sha256.

        It appears when its length and its sha256 (this one, or the metadata's; without either, the MD5 of its
        ETag) are right and it is on the disk. Until then its bytes are in a hidden file beside it; the next
        call goes on with that of a big file. progress(bytes): less than 0 where bytes have to come again. The
        folder must exist.
        """
        return object_store_files.fetch(self.requests, key, path, size, sha256, progress or _nothing)

    def send(self, path: str, key: str, progress: _Progress = None, sha256: str | None = None) -> str:
        """Store a file under a key, with its sha256 as metadata; the sha256.

        sha256: what the file must have. A file that changes meanwhile is refused. Big files go in parts,
        which are taken back when they do not come to an end.
        """
        return object_store_files.send(self, path, key, sha256, progress or _nothing)

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
