"""Read, write and list the objects below a URL of an object store: S3 or Huawei's OBS.

    store = ObjectStore("obs://bucket/folder")
    for entry in store.list():
        store.fetch(entry.key, path, entry.size)

Keys are relative to the URL. client.py sends the requests and repeats them; boto3 transfers big files in
parts. This class compares what arrives with the sha256 in the metadata of the object, and writes files
atomically. Every error is one line with bucket, key and cause.
"""

import contextlib
import hashlib
import io
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from bootfile.ground.errors import BadInput, printable
from bootfile.ground.files import open_atomic, sha256_file, state_of
from common.ground.files import has_digest
from common.object_store.client import PARTS, Client
from common.object_store.errors import MISSING, Damaged, StoreError, of_the_disk

_SHA256 = "sha256"  # the name of the metadata entry
_LARGEST = 2**30  # bytes of an object that is read into memory
_PART = 2**23  # bytes of a part of a larger file
_Progress = Callable[[int], object]  # takes a number of bytes


class Object(NamedTuple):
    """An object, with its key relative to the URL. size in bytes, modified in seconds since 1970.

    etag, modified: "" and 0.0 if the store does not give them. sha256: from the metadata, or the one that is
    expected; md5: the ETag, if it is one. Both in hex, and None in listings.
    """

    key: str
    size: int
    etag: str = ""
    modified: float = 0.0
    sha256: str | None = None
    md5: str | None = None

    @property
    def digest(self) -> str | None:
        """The digest of the content that the store keeps, if any."""
        return self.sha256 or self.md5


def _ignore(_: int) -> None:
    """Show no progress."""


class ObjectStore(contextlib.AbstractContextManager):
    """The objects below one URL. The end of a `with` block closes the connections. All methods may be called
    from several threads. threads: the number of threads that use it. `client`: sends the requests.
    `location`: the parts of the URL. Raises BadInput; its methods raise StoreError."""

    def __init__(self, url: str, threads: int = 16):
        self.threads = threads
        self.client = Client(url, threads)
        self.location = self.client.location

    def list(self, prefix: str = "") -> Iterator[Object]:
        """Yield all objects below URL/prefix, without the empty objects that represent folders. Most stores
        list them by key, but not all."""
        skip = len(self.location.full(""))
        folder = prefix.strip("/")
        below = self.location.full(f"{folder}/" if folder else "")
        # not ListObjectsV2: stores without it stop silently at 1,000 keys
        for entry in self.client.entries("list_objects", "Contents", Prefix=below):
            with self.client.explained(prefix):
                key = entry["Key"]
                size = entry["Size"]
                if not (key.endswith("/") and size == 0):
                    yield Object(key[skip:], size, _etag_of(entry), _seconds(entry.get("LastModified")))

    def folders(self) -> Iterator[str]:
        """Yield the names of the folders directly below the URL, without listing their content."""
        below = self.location.full("")
        for entry in self.client.entries("list_objects", "CommonPrefixes", Prefix=below, Delimiter="/"):
            yield entry["Prefix"][len(below) : -1]

    def uploads(self) -> Iterator[tuple[str, str, float]]:
        """Yield (key, upload id, seconds since 1970) of the unfinished multipart uploads, which cost storage
        until abort()."""
        below = self.location.full("")
        for entry in self.client.entries("list_multipart_uploads", "Uploads", Prefix=below):
            begun = _seconds(entry.get("Initiated")) or time.time()  # it may be running
            yield entry["Key"][len(below) :], entry["UploadId"], begun

    def head(self, key: str) -> Object | None:
        """Return an object, with the sha256 of its metadata, which a listing has not; None if it does not
        exist. One HEAD request: the bytes are not read."""
        try:
            entry, _ = self._open("head_object", key)
        except StoreError as error:
            if error.reason in MISSING:
                return None
            raise
        return entry

    def read(self, key: str) -> bytes:
        """Return the bytes of an object of at most 1 GiB."""
        return self._read(key)[0]

    def read_version(self, key: str) -> tuple[bytes, str | None]:
        """Return (bytes, ETag) of an object, as replace() needs it; (b"", None) if there is no object. The
        ETag is "" if the store gives none."""
        try:
            content, entry = self._read(key)
            return content, entry.etag
        except StoreError as error:
            if error.reason in MISSING:
                return b"", None
            raise

    def fetch(
        self, key: str, path: str, size: int, progress: _Progress = _ignore, sha256: str | None = None
    ) -> bool:
        """Download an object to the file `path`, atomically. The folder must exist. Return False if there was
        no digest to compare the bytes with.

        size: the expected length in bytes.
        progress: called with the number of new bytes; negative if bytes must be downloaded again.
        sha256: the expected sha256. Default: the one in the metadata; without it the MD5 in the ETag is used.
        """
        try:
            with open_atomic(path) as file:
                # one request for a small object; of a larger one several parts are under way
                if size <= _PART:
                    content, entry = self._read(key, size, sha256)
                    file.write(content)
                    progress(size)
                else:
                    transfer = partial(self._fetch_parts, key, file, size, sha256, progress)
                    entry = self.client.repeat(transfer)
            return bool(sha256 or entry.digest)
        except OSError as error:
            raise of_the_disk(error, path) from error

    def send(self, path: str, key: str, progress: _Progress = _ignore, sha256: str | None = None) -> None:
        """Upload a file, with its sha256 as metadata. A file that changes during the upload is refused. Big
        files are sent in parts, which are deleted if the upload fails.

        progress: as in fetch(). sha256: the expected sha256 of the file.
        """

        def transfer() -> None:
            with open(path, "rb") as file, self._transfer(key, before[1], progress) as options:
                self.client.s3.upload_fileobj(file, ExtraArgs={"Metadata": {_SHA256: actual}}, **options)

        try:
            # the file is read twice, for its digest and for the request: it must not change between
            before = state_of(path)
            actual = sha256_file(path)
            if sha256 not in (None, actual):
                raise BadInput(f"{printable(path)} has changed since its sha256 was computed")
            self.client.repeat(transfer)
            if state_of(path) != before:
                with contextlib.suppress(StoreError):  # its digest shows that it is damaged
                    self.delete([key])
                raise BadInput(f"{printable(path)} has changed while it was uploaded")
        except OSError as error:
            raise of_the_disk(error, path) from error

    def write(self, key: str, content: bytes, **condition: str) -> str:
        """Store a few bytes under a key, and return the ETag. condition: IfMatch or IfNoneMatch."""
        parameters = {"Body": content, "Metadata": {_SHA256: hashlib.sha256(content).hexdigest()}}
        request = partial(self.client.call, "put_object", key, **parameters, **condition)
        return _etag_of(self.client.repeat(request))

    def replace(self, key: str, content: bytes, etag: str | None) -> str | None:
        """Store a few bytes under a key if the object has this ETag (None: if there is no object). Return the
        new ETag; None if the object is another one. A store without conditional writes always replaces it,
        and so does one without ETags ("")."""
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        try:
            return self.write(key, content, **({} if etag == "" else condition))
        except StoreError as error:
            if error.reason == "NotImplemented":
                return self.write(key, content)
            # a store answers a condition on an object that is gone with 404
            if error.reason in (*MISSING, "412", "PreconditionFailed"):
                return None
            raise

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. A missing object is not an error."""
        # One request for each key: for a multi-object delete boto3 sends a checksum that OBS does not know.
        with ThreadPoolExecutor(self.threads) as pool:
            for _ in pool.map(partial(self.client.call, "delete_object"), keys):
                pass  # an error of a thread is raised here

    def abort(self, key: str, upload_id: str) -> None:
        """Abort an unfinished multipart upload. A missing upload is not an error."""
        try:
            self.client.call("abort_multipart_upload", key, UploadId=upload_id)
        except StoreError as error:
            if error.reason not in ("NoSuchUpload", "404"):
                raise

    def stop(self) -> None:
        """Make the current and later calls of all threads end soon with a StoreError, after Ctrl-C."""
        self.client.stop()

    def __exit__(self, *_):
        self.client.s3.close()

    def _open(self, operation: str, key: str, size: int | None = None) -> tuple[Object, dict]:
        """Return an object and the answer to a HEAD or GET. size: the expected length."""
        answer = self.client.call(operation, key)
        with self.client.explained(key):
            length = answer["ContentLength"]
            etag = _etag_of(answer)
            if size not in (None, length):
                text = f"it has {length} bytes, expected {size}: it was replaced"
                raise StoreError(f"{self.location.url(key)}: {text}", "replaced")
            # our sha256, if bootfile or a user has sent the object with one
            metadata = {name.lower(): value for name, value in answer.get("Metadata", {}).items()}
            sha256 = metadata.get(_SHA256, "").lower()  # some stores write the name with a capital letter
            # the ETag of an encrypted object is not the MD5 of its bytes
            is_encrypted = any("encryption" in name for name in answer["ResponseMetadata"]["HTTPHeaders"])
            is_md5 = re.fullmatch("[0-9a-f]{32}", etag) and not is_encrypted
            digests = (sha256 if re.fullmatch("[0-9a-f]{64}", sha256) else None, etag if is_md5 else None)
            return Object(key, length, etag, _seconds(answer.get("LastModified")), *digests), answer

    def _read(self, key: str, size: int | None = None, sha256: str | None = None) -> tuple[bytes, Object]:
        """Read an object into memory, and check it against its metadata, or against the size and sha256."""

        def transfer() -> tuple[bytes, Object]:
            entry, answer = self._open("get_object", key, size)
            try:
                with self.client.explained(key):
                    if not 0 <= entry.size <= _LARGEST:
                        raise Damaged(f"it has {entry.size} bytes, expected at most {_LARGEST}")
                    content = answer["Body"].read(entry.size + 1)  # it may be longer than its header says
                    _check_count(len(content), entry.size)
                    _check_digest(io.BytesIO(content), entry, sha256)
                    return content, entry
            except StoreError as error:
                # the bytes were cut or damaged on their way: another answer may be whole
                error.again = True
                raise

        return self.client.repeat(transfer)

    def _fetch_parts(
        self, key: str, file: BinaryIO, size: int, sha256: str | None, progress: _Progress
    ) -> Object:
        """Download an object in parts into a file, which begins again, and check its bytes."""
        entry, _ = self._open("head_object", key, size)
        file.truncate(0)
        with self._transfer(key, size, progress) as options:
            self.client.s3.download_fileobj(Fileobj=file, **options)
            file.flush()
            # the parts have arrived in any order: the digest is that of the file
            with open(file.fileno(), "rb", closefd=False) as written:
                written.seek(0)
                _check_digest(written, entry, sha256)
        return entry

    @contextlib.contextmanager
    def _transfer(self, key: str, size: int, progress: _Progress) -> Iterator[dict[str, Any]]:
        """Yield the arguments of boto3's upload_fileobj() and download_fileobj(), which transfer a file in
        parts. Raises StoreError and OSError for the errors of the block."""
        from boto3.s3.transfer import TransferConfig

        # a file of one part is one request; of a larger one PARTS parts are under way at a time
        config = TransferConfig(
            multipart_threshold=_PART + 1,
            multipart_chunksize=_PART,
            max_concurrency=PARTS,
            num_download_attempts=self.client.attempts,
            preferred_transfer_client="classic",
        )
        count = 0  # bytes so far
        lock = threading.Lock()

        def note(new: int) -> None:  # boto3 calls it in each of its threads
            nonlocal count
            self.client.check_stopped(key)
            with lock:
                count += new
            if count > size:
                _check_count(count, size)
            progress(new)

        place = {"Bucket": self.location.bucket, "Key": self.location.full(key)}
        try:
            with self.client.explained(key):
                yield place | {"Callback": note, "Config": config}
                _check_count(count, size)
        # these bytes come again, or never
        except StoreError:
            progress(-count)
            raise


def _etag_of(answer: dict) -> str:
    """Return the ETag of an answer or of an entry; "" without one: the protocol leaves it optional."""
    return (answer.get("ETag") or "").removeprefix("W/").strip('"')


def _seconds(moment: Any) -> float:
    """Return the seconds since 1970 of a datetime; 0.0 for None."""
    return moment.timestamp() if moment else 0.0


def _check_count(count: int, size: int) -> None:
    """Raise Damaged if the number of bytes that arrived is not the size of the object."""
    if count != size:
        raise Damaged(f"the answer was cut or is too long: {count} bytes arrived, expected {size}")


def _check_digest(file: BinaryIO, entry: Object, sha256: str | None) -> None:
    """Compare received bytes with `sha256`, or the sha256 of the metadata, or the MD5 in the ETag."""
    digest = sha256 or entry.digest
    if digest and not has_digest(file, digest):
        raise Damaged(f"the received bytes are not those that were sent (digest {digest[:12]}... expected)")
