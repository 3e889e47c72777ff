"""Send requests to the server of a URL with boto3, and judge its answers.

boto3 retries the requests that failed. What it does not see is seen here: a listing that repeats or is cut, a
web page in place of an answer, and bytes that arrive damaged.

The environment gives the endpoint (location.py) and the credentials (AWS_*, OBS_*, or boto3's usual files).
BOOTFILE_STORE_ATTEMPTS (default 5) and BOOTFILE_STORE_TIMEOUT (seconds without a byte, default 30) limit the
waiting time.
"""

import contextlib
import math
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from bootfile.ground.errors import BadInput, import_optional, printable
from common.object_store.errors import Damaged, StoreError, explain
from common.object_store.location import check_encrypted, find_endpoint, parse

T = TypeVar("T")
PARTS = 4  # parts of a file that are transferred at a time
_PAGE = 1000  # keys in an answer: stores return no more
_MOST_PAGES = 10**5  # answers to one listing
_CONNECT_TIMEOUT = 10.0  # seconds
_LONGEST_WAIT = 20.0  # seconds before another attempt


class Client:
    """boto3's client for one URL. Threads may share it; `threads` is their number.

    location: the parts of the URL. endpoint: its server. s3: the client of boto3.
    attempts: how often a request is sent at most. Raises BadInput; its methods raise StoreError.
    """

    def __init__(self, url: str, threads: int):
        self.location = parse(url)
        self.endpoint = find_endpoint(self.location.scheme, self.location.bucket)
        self.attempts = math.ceil(_read_number("BOOTFILE_STORE_ATTEMPTS", 5))
        self._stopped = threading.Event()
        timeout = _read_number("BOOTFILE_STORE_TIMEOUT", 30)
        with self.explained():
            self.s3 = self._connect(timeout, threads)

    def call(self, operation: str, key: str, **parameters) -> dict:
        """Return the answer to an operation of boto3 on an object."""
        place = {"Bucket": self.location.bucket, "Key": self.location.full(key)}
        with self.explained(key):
            return getattr(self.s3, operation)(**place, **parameters)

    def entries(self, operation: str, kind: str, **parameters) -> Iterator[dict]:
        """Yield each entry of a listing once. Pages may overlap, and be in any order. operation: of boto3,
        with its parameters, Prefix among them. kind: the name of the entries in its answer."""
        # with a known size: a full answer that does not say whether it is the last one is noticed below
        if operation == "list_objects":
            parameters["MaxKeys"] = _PAGE
        pages = self.s3.get_paginator(operation).paginate(Bucket=self.location.bucket, **parameters)
        seen = set[Any]()
        with self.explained():
            for number, page in enumerate(pages):
                entries = page.get(kind, [])
                before = len(seen)
                for entry in entries:
                    name = entry["Prefix"] if kind == "CommonPrefixes" else entry["Key"]
                    if not name.startswith(parameters["Prefix"]):
                        raise Damaged(f"the answer lists {printable(name)}")
                    identity = (name, entry.get("UploadId"))  # a key may have several uploads
                    if identity not in seen:
                        seen.add(identity)
                        yield entry
                # a page without a new entry that is not the last one comes again for ever
                is_last = page.get("IsTruncated") is False
                if number == _MOST_PAGES or (entries and len(seen) == before and not is_last):
                    raise Damaged("the listing does not end: the store repeats a page")
                if len(entries) >= _PAGE and "IsTruncated" not in page:
                    raise Damaged("the answer does not say whether the listing ends")

    def repeat(self, transfer: Callable[[], T]) -> T:
        """Return transfer(). Repeat it, in this thread, if its bytes were damaged or truncated: boto3 does
        not see that. The wait before another attempt ends with stop()."""
        for attempt in range(1, self.attempts):
            try:
                return transfer()
            except StoreError as error:
                if not error.again:
                    raise
            self._stopped.wait(random.uniform(0, min(_LONGEST_WAIT, 2**attempt)))
        return transfer()

    @contextlib.contextmanager
    def explained(self, key: str = "") -> Iterator[None]:
        """Raise the StoreError for an exception of the block, and if the client was stopped."""
        self.check_stopped(key)
        try:
            yield
        except BadInput:
            raise
        except Exception as error:
            if failure := explain(error, self.location.url(key), self.endpoint.name):
                raise failure from error
            raise

    def check_stopped(self, key: str) -> None:
        """Raise StoreError after stop()."""
        if self._stopped.is_set():
            raise StoreError(f"{self.location.url(key)}: interrupted", "interrupted")

    def stop(self) -> None:
        """Make the current and later requests of all threads end soon with a StoreError."""
        self._stopped.set()

    def _connect(self, read_timeout: float, threads: int) -> Any:
        """Return boto3's S3 client. Raises BadInput if boto3 is missing, and any exception of boto3."""
        boto3 = import_optional("boto3", "object stores need boto3")
        from botocore.config import Config
        from botocore.utils import conditionally_calculate_md5

        # boto3 reads AWS_* by itself, and does not know OBS_*
        obs_key = os.environ.get("OBS_ACCESS_KEY_ID")
        takes_obs = obs_key and (self.location.scheme == "obs" or not os.environ.get("AWS_ACCESS_KEY_ID"))
        keys = {
            "aws_access_key_id": obs_key,
            "aws_secret_access_key": os.environ.get("OBS_SECRET_ACCESS_KEY"),
            "aws_session_token": os.environ.get("OBS_SECURITY_TOKEN") or None,
        }
        # mode "standard" of botocore 1.44: all threads together may repeat 35 requests, within a second
        config = Config(
            connect_timeout=_CONNECT_TIMEOUT,
            read_timeout=read_timeout,
            retries={"mode": "legacy", "total_max_attempts": self.attempts},
            max_pool_connections=PARTS * threads,
            s3={"addressing_style": self.endpoint.style},
            request_checksum_calculation="when_required",
        )
        where = {"endpoint_url": self.endpoint.url, "region_name": self.endpoint.region}
        client = boto3.session.Session().client("s3", config=config, **where, **(keys if takes_obs else {}))
        # Stores other than Amazon's do not know the newer checksums, but check an MD5.
        client.meta.events.register("before-call.s3.GetObject", _ask_for_no_checksum)
        for operation in ("PutObject", "UploadPart"):
            client.meta.events.register(f"before-call.s3.{operation}", conditionally_calculate_md5)
        for operation in ("PutObject", "DeleteObject", "ListObjects", "ListMultipartUploads"):
            client.meta.events.register(f"after-call.s3.{operation}", _refuse_pages)
        check_encrypted(client.meta.endpoint_url)  # boto3's files may also name an endpoint
        return client


def _ask_for_no_checksum(params: dict, **_: object) -> None:
    """Remove, before a GET, a header that boto3 adds: other stores refuse it."""
    # not with response_checksum_validation: s3transfer then takes the size from the store's Content-Range
    params["headers"].pop("x-amz-checksum-mode", None)


def _refuse_pages(http_response: Any, parsed: dict, **_: object) -> None:
    """Raise Damaged, after a request that writes, deletes or lists, if a web page has answered with status
    200, such as that of a proxy: boto3 finds no objects in it, and takes it for a file that was stored."""
    if http_response.status_code < 300 and not parsed.keys() - {"ResponseMetadata"} and http_response.content:
        begin = printable(http_response.content[:40].decode(errors="replace"))
        raise Damaged(f"it was not an object store that answered, but {begin!r}: check the endpoint")


def _read_number(name: str, default: float) -> float:
    """Return the number in an environment variable. Raises BadInput if it is not above 0."""
    with contextlib.suppress(ValueError):
        value = float(os.environ.get(name) or default)
        if 0 < value < 1e6:
            return value
    raise BadInput(f"{name}={os.environ[name]} is not a number above 0")
