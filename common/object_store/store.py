"""Read, write and list the objects below a URL of an object store: S3 or Huawei's OBS.

    store = ObjectStore("obs://bucket/folder")
    for entry in store.list():
        store.fetch(entry.key, path, entry.size)

Keys are relative to the URL. boto3 sends the requests, retries them, and transfers big files in parts. This
class compares what arrives with the sha256 in the metadata of the object, and writes files atomically. Every
error is one line with bucket, key and cause.

The environment gives the endpoint (location.py) and the credentials (AWS_*, OBS_*, or boto3's usual files).
BOOTFILE_STORE_ATTEMPTS (default 5) and BOOTFILE_STORE_TIMEOUT (seconds without a byte, default 30) limit the
waiting time.
"""

import contextlib
import hashlib
import io
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, BinaryIO, NamedTuple, TypeVar

from bootfile.ground.errors import BadInput, import_optional, printable
from bootfile.ground.files import open_atomic, sha256_file, state_of
from common.ground.files import has_digest
from common.object_store.errors import MISSING, Damaged, StoreError, explain, of_the_disk
from common.object_store.location import check_encrypted, find_endpoint, parse

T = TypeVar("T")
_SHA256 = "sha256"  # the name of the metadata entry
_PAGE, _MOST_PAGES = 1000, 10**5  # keys in an answer (stores return no more), answers to one listing
_LARGEST = 2**30  # bytes of an object that is read into memory
_PART, _PARTS = 2**23, 4  # bytes of a part of a larger file; parts of a file that are transferred at a time
_CONNECT_TIMEOUT, _LONGEST_WAIT = 10.0, 20.0  # seconds for a connection; before another attempt
_Progress = Callable[[int], object]  # takes a number of bytes


class Object(NamedTuple):
    """An object, with its key relative to the URL. size in bytes, modified in seconds since 1970.

    etag, modified: "" and 0.0 if the store does not give them. sha256: from the metadata; md5: the ETag, if
    it is one. Both are in hex, and None in listings.
    """

    key: str
    size: int
    etag: str
    modified: float
    sha256: str | None = None
    md5: str | None = None

    @property
    def digest(self) -> str | None:
        """The digest of the content that the store keeps, if any."""
        return self.sha256 or self.md5


class ObjectStore(contextlib.AbstractContextManager):
    """The objects below one URL. The end of a `with` block closes the connections.

    All methods may be called from several threads. threads: the number of threads that use it.
    Raises BadInput; its methods raise StoreError.
    """

    def __init__(self, url: str, threads: int = 16):
        self.location, self.threads = parse(url), threads
        self.endpoint = find_endpoint(*self.location[:2])
        self.attempts = int(_read_number("BOOTFILE_STORE_ATTEMPTS", 5))
        self._stopped = threading.Event()
        timeout = _read_number("BOOTFILE_STORE_TIMEOUT", 30)
        with self._explained():
            self.client = self._connect(timeout)

    def list(self, prefix: str = "") -> Iterator[Object]:
        """Yield all objects below URL/prefix, without the empty objects that represent folders. Most stores
        list them by key, but not all."""
        skip, folder = len(self.location.full("")), prefix.strip("/")
        below = self.location.full(f"{folder}/" if folder else "")
        options = {"Prefix": below, "MaxKeys": _PAGE}
        # not ListObjectsV2: stores without it stop silently at 1,000 keys
        for entry in self._list("list_objects", "Contents", **options):
            with self._explained(prefix):
                key, size = entry["Key"], entry["Size"]
                if not (key.endswith("/") and size == 0):
                    yield Object(key[skip:], size, _etag_of(entry), _seconds(entry.get("LastModified")))

    def folders(self) -> Iterator[str]:
        """Yield the names of the folders directly below the URL, without listing their content."""
        below = self.location.full("")
        options = {"Prefix": below, "Delimiter": "/", "MaxKeys": _PAGE}
        for entry in self._list("list_objects", "CommonPrefixes", **options):
            yield entry["Prefix"][len(below) : -1]

    def uploads(self) -> Iterator[tuple[str, str, float]]:
        """Yield (key, upload id, seconds since 1970) of the unfinished multipart uploads."""
        below = self.location.full("")
        for entry in self._list("list_multipart_uploads", "Uploads", Prefix=below):
            begun = _seconds(entry.get("Initiated")) or time.time()  # it may be running
            yield entry["Key"][len(below) :], entry["UploadId"], begun

    def head(self, key: str) -> Object | None:
        """Return an object, with the sha256 of its metadata; None if it does not exist."""
        try:
            return self._open("head_object", key)[0]
        except StoreError as error:
            if error.reason in MISSING:
                return None
            raise

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
        self,
        key: str,
        path: str,
        size: int,
        progress: _Progress = lambda count: None,
        sha256: str | None = None,
    ) -> bool:
        """Download an object to the file `path`, atomically. The folder must exist. Return False if there was
        no digest to compare the bytes with.

        size: the expected length in bytes.
        progress: called with the number of new bytes; negative if bytes must be downloaded again.
        sha256: the expected sha256. Default: the one in the metadata; without it the MD5 in the ETag is used.
        """
        try:
            with open_atomic(path) as file:
                if size <= _PART:
                    content, entry = self._read(key, size, sha256)
                    file.write(content)
                    progress(size)
                else:
                    entry = self._repeat(lambda: self._fetch_parts(key, file, size, sha256, progress))
            return bool(sha256 or entry.digest)
        except OSError as error:
            raise of_the_disk(error, path) from error

    def send(
        self,
        path: str,
        key: str,
        progress: _Progress = lambda count: None,
        sha256: str | None = None,
    ) -> None:
        """Upload a file, with its sha256 as metadata.

        progress: as in fetch(). sha256: the expected sha256 of the file. A file that changes during the
        upload is refused. Big files are sent in parts, which are deleted if the upload fails.
        """

        def transfer() -> None:
            with open(path, "rb") as file, self._transfer(key, before[1], progress) as options:
                self.client.upload_fileobj(file, ExtraArgs={"Metadata": {_SHA256: actual}}, **options)

        try:
            before = state_of(path)
            actual = sha256_file(path)
            if sha256 not in (None, actual):
                raise BadInput(f"{printable(path)} has changed since its sha256 was computed")
            self._repeat(transfer)
            if state_of(path) != before:
                self.delete([key])
                raise BadInput(f"{printable(path)} has changed while it was uploaded")
        except OSError as error:
            raise of_the_disk(error, path) from error

    def write(self, key: str, content: bytes, **condition: str) -> str:
        """Store a few bytes under a key, and return the ETag. condition: IfMatch or IfNoneMatch."""
        parameters = {"Body": content, "Metadata": {_SHA256: hashlib.sha256(content).hexdigest()}}
        answer = self._repeat(lambda: self._call("put_object", key, **parameters, **condition))
        return _etag_of(answer)

    def replace(self, key: str, content: bytes, etag: str | None) -> str | None:
        """Store a few bytes under a key if the object has this ETag (None: if there is no object). Return the
        new ETag; None if the object is another one. A store without conditional writes always replaces it,
        and so does one without ETags ("")."""
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag} if etag else {}
        try:
            return self.write(key, content, **condition)
        except StoreError as error:
            if error.reason == "NotImplemented":
                return self.write(key, content)
            if error.reason in (*MISSING, "412", "PreconditionFailed"):
                return None
            raise

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. A missing object is not an error."""
        # One request for each key: for a multi-object delete boto3 sends a checksum that OBS does not know.
        with ThreadPoolExecutor(self.threads) as pool:
            for _ in pool.map(lambda key: self._call("delete_object", key), keys):
                pass

    def abort(self, key: str, upload_id: str) -> None:
        """Abort an unfinished multipart upload. A missing upload is not an error."""
        try:
            self._call("abort_multipart_upload", key, UploadId=upload_id)
        except StoreError as error:
            if error.reason not in ("NoSuchUpload", "404"):
                raise

    def run(self, tasks: Iterable[Callable[[], T]], beat: Callable[[], object] = lambda: None) -> Sequence[T]:
        """Run the tasks in `threads` threads, and return [task() for task in tasks].

        If a task or beat() raises an exception, or on Ctrl-C, stop the store and raise that exception.

        beat: called about once a second, and after each task.
        """
        results: dict[int, T] = {}
        running: dict[Future[T], int] = {}
        pool = ThreadPoolExecutor(self.threads, "transfer")
        waiting = enumerate(tasks)
        try:
            while True:
                while len(running) < 4 * self.threads and (task := next(waiting, None)):
                    running[pool.submit(task[1])] = task[0]
                if not running:
                    return [results[number] for number in sorted(results)]
                for done in wait(running, 1.0, FIRST_COMPLETED).done:
                    results[running.pop(done)] = done.result()
                beat()
        except BaseException:
            self.stop()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def stop(self) -> None:
        """Make the current and later calls of all threads end soon with a StoreError, after Ctrl-C."""
        self._stopped.set()

    def __exit__(self, *_):
        self.client.close()

    def _connect(self, read_timeout: float) -> Any:
        """Return boto3's S3 client. Raises BadInput if boto3 is missing, and any exception of boto3."""
        boto3 = import_optional("boto3", "object stores need boto3")
        from botocore.config import Config
        from botocore.utils import conditionally_calculate_md5

        keys, given = {}, os.environ.get("OBS_ACCESS_KEY_ID")
        if given and (self.location.scheme == "obs" or not os.environ.get("AWS_ACCESS_KEY_ID")):
            keys = {
                "aws_access_key_id": given,
                "aws_secret_access_key": os.environ.get("OBS_SECRET_ACCESS_KEY"),
                "aws_session_token": os.environ.get("OBS_SECURITY_TOKEN") or None,
            }
        # mode "standard" of botocore 1.44: all threads together may repeat 35 requests, within a second
        config = Config(
            connect_timeout=_CONNECT_TIMEOUT,
            read_timeout=read_timeout,
            retries={"mode": "legacy", "total_max_attempts": self.attempts},
            max_pool_connections=_PARTS * self.threads,
            s3={"addressing_style": self.endpoint.style},
            request_checksum_calculation="when_required",
        )
        where = {"endpoint_url": self.endpoint.url, "region_name": self.endpoint.region}
        client = boto3.session.Session().client("s3", config=config, **where, **keys)
        # Stores other than Amazon's do not know the newer checksums, but check an MD5.
        client.meta.events.register("before-call.s3.GetObject", _ask_for_no_checksum)
        for operation in ("PutObject", "UploadPart"):
            client.meta.events.register(f"before-call.s3.{operation}", conditionally_calculate_md5)
        for operation in ("PutObject", "DeleteObject", "ListObjects", "ListMultipartUploads"):
            client.meta.events.register(f"after-call.s3.{operation}", _refuse_pages)
        check_encrypted(client.meta.endpoint_url)  # boto3's files may also name an endpoint
        return client

    @contextlib.contextmanager
    def _explained(self, key: str = "") -> Iterator[None]:
        """Raise the StoreError for an exception of the block, and if the store was stopped."""
        self._check_stopped(key)
        try:
            yield
        except BadInput:
            raise
        except Exception as error:
            if failure := explain(error, self.location.url(key), self.endpoint.name):
                raise failure from error
            raise

    def _check_stopped(self, key: str) -> None:
        if self._stopped.is_set():
            raise StoreError(f"{self.location.url(key)}: interrupted", "interrupted")

    def _call(self, operation: str, key: str, **parameters) -> dict:
        """Return the answer to an operation of boto3 on an object."""
        with self._explained(key):
            return getattr(self.client, operation)(
                Bucket=self.location.bucket, Key=self.location.full(key), **parameters
            )

    def _open(self, operation: str, key: str, size: int | None = None) -> tuple[Object, dict]:
        """Return an object and the answer to a HEAD or GET. size: the expected length."""
        answer = self._call(operation, key)
        with self._explained(key):
            length, etag = answer["ContentLength"], _etag_of(answer)
            if size not in (None, length):
                text = f"it has {length} bytes, expected {size}: it was replaced"
                raise StoreError(f"{self.location.url(key)}: {text}", "replaced")
            metadata = {name.lower(): value for name, value in answer.get("Metadata", {}).items()}
            sha256 = metadata.get(_SHA256, "").lower()  # some stores write the name with a capital letter
            is_encrypted = any("encryption" in name for name in answer["ResponseMetadata"]["HTTPHeaders"])
            is_md5 = re.fullmatch("[0-9a-f]{32}", etag) and not is_encrypted
            return Object(
                key, length, etag, _seconds(answer.get("LastModified")),
                sha256 if re.fullmatch("[0-9a-f]{64}", sha256) else None, etag if is_md5 else None,
            ), answer  # fmt: skip

    def _repeat(self, transfer: Callable[[], T]) -> T:
        """Return transfer(). Repeat it if its bytes were damaged or truncated: boto3 does not see that."""
        for attempt in range(1, self.attempts):
            try:
                return transfer()
            except StoreError as error:
                if not error.again:
                    raise
            self._stopped.wait(random.uniform(0, min(_LONGEST_WAIT, 2**attempt)))
        return transfer()

    def _list(self, operation: str, kind: str, **parameters) -> Iterator[dict]:
        """Yield each entry of a listing once. Pages may overlap, and be in any order."""
        pages = self.client.get_paginator(operation).paginate(Bucket=self.location.bucket, **parameters)
        seen = set[Any]()
        with self._explained():
            for number, page in enumerate(pages):
                entries, before = page.get(kind, []), len(seen)
                for entry in entries:
                    name = entry["Prefix" if kind == "CommonPrefixes" else "Key"]
                    if not name.startswith(parameters["Prefix"]):
                        raise Damaged(f"the answer lists {printable(name)}")
                    identity = (name, entry["UploadId"]) if kind == "Uploads" else name
                    if identity not in seen:
                        seen.add(identity)
                        yield entry
                is_last = page.get("IsTruncated") is False
                if number == _MOST_PAGES or (entries and len(seen) == before and not is_last):
                    raise Damaged("the listing does not end: the store repeats a page")
                if len(entries) >= _PAGE and "IsTruncated" not in page:
                    raise Damaged("the answer does not say whether the listing ends")

    def _read(self, key: str, size: int | None = None, sha256: str | None = None) -> tuple[bytes, Object]:
        """Read an object into memory, and check it against its metadata, or against the size and sha256."""

        def transfer() -> tuple[bytes, Object]:
            entry, answer = self._open("get_object", key, size)
            try:
                with self._explained(key):
                    if not 0 <= entry.size <= _LARGEST:
                        raise Damaged(f"it has {entry.size} bytes, expected at most {_LARGEST}")
                    content = answer["Body"].read(entry.size + 1)  # it may be longer than its header says
                    _check_count(len(content), entry.size)
                    _check_digest(io.BytesIO(content), entry, sha256)
                    return content, entry
            except StoreError as error:
                error.again = True
                raise

        return self._repeat(transfer)

    def _fetch_parts(
        self,
        key: str,
        file: BinaryIO,
        size: int,
        sha256: str | None,
        progress: _Progress,
    ) -> Object:
        entry, _ = self._open("head_object", key, size)
        file.truncate(0)
        with self._transfer(key, size, progress) as options:
            self.client.download_fileobj(Fileobj=file, **options)
            file.flush()
            with open(file.fileno(), "rb", closefd=False) as written:
                written.seek(0)
                _check_digest(written, entry, sha256)
        return entry

    @contextlib.contextmanager
    def _transfer(self, key: str, size: int, progress: _Progress) -> Iterator[dict[str, Any]]:
        """Yield the arguments of boto3's upload_fileobj() and download_fileobj(), which transfer a file in
        parts. Raises StoreError and OSError for the errors of the block."""
        from boto3.s3.transfer import TransferConfig

        config = TransferConfig(
            multipart_threshold=_PART + 1,
            multipart_chunksize=_PART,
            max_concurrency=_PARTS,
            num_download_attempts=self.attempts,
            preferred_transfer_client="classic",
        )
        count, lock = 0, threading.Lock()

        def note(new: int) -> None:
            nonlocal count
            self._check_stopped(key)
            with lock:
                count += new
            if count > size:
                _check_count(count, size)
            progress(new)

        place = {"Bucket": self.location.bucket, "Key": self.location.full(key)}
        try:
            with self._explained(key):
                yield place | {"Callback": note, "Config": config}
                _check_count(count, size)
        except StoreError:
            progress(-count)
            raise


def _ask_for_no_checksum(params: dict, **_: object) -> None:
    # not with response_checksum_validation: s3transfer then takes the size from the store's Content-Range
    params["headers"].pop("x-amz-checksum-mode", None)


def _refuse_pages(http_response: Any, parsed: dict, **_: object) -> None:
    """Raise Damaged if a web page has answered with status 200, for example that of a proxy: boto3 finds no
    objects in it, and takes it for a file that was stored."""
    if http_response.status_code < 300 and not parsed.keys() - {"ResponseMetadata"} and http_response.content:
        begin = printable(http_response.content[:40].decode(errors="replace"))
        raise Damaged(f"it was not an object store that answered, but {begin!r}: check the endpoint")


def _etag_of(answer: dict) -> str:
    """Return the ETag of an answer or of an entry; "" without one: the protocol leaves it optional."""
    return (answer.get("ETag") or "").removeprefix("W/").strip('"')


def _seconds(moment: Any) -> float:
    return moment.timestamp() if moment else 0.0


def _check_count(count: int, size: int) -> None:
    if count != size:
        raise Damaged(f"the answer was cut or is too long: {count} bytes arrived, expected {size}")


def _check_digest(file: BinaryIO, entry: Object, sha256: str | None) -> None:
    """Compare received bytes with `sha256`, or the sha256 of the metadata, or the MD5 in the ETag."""
    digest = sha256 or entry.digest
    if digest and not has_digest(file, digest):
        raise Damaged(f"the received bytes are not those that were sent (digest {digest[:12]}... expected)")


def _read_number(name: str, default: float) -> float:
    try:
        value = float(os.environ.get(name) or default)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise BadInput(f"{name}={os.environ[name]} is not a number above 0")
    return value
