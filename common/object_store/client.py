"""Make boto3's client, and read its answers: the facts about an object, and its bytes."""

import contextlib
import functools
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from common.exits import BadInput, import_optional
from common.object_store.errors import Damaged, explain, shown
from common.object_store.location import NEEDS_HTTPS, USE_HTTPS, Endpoint, is_clear_text

SHA256 = "sha256"  # the name of the metadata entry
_CONNECT_TIMEOUT = 10.0  # seconds
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_CHUNK = 2**18  # bytes
_SLOWEST = 2**14  # bytes per second: the lowest speed of a body; the time-out is added to its time
_JOINING = 600.0  # seconds to join the parts of an upload: meanwhile the store sends spaces
_FIELDS = {  # operation, or list in its answer -> fields that the answer, or an entry of the list, must have
    "get_object": "ContentLength ETag", "head_object": "ContentLength ETag LastModified",
    "put_object": "ETag", "upload_part": "ETag", "create_multipart_upload": "UploadId",
    "Contents": "Key Size ETag LastModified", "CommonPrefixes": "Prefix", "Uploads": "Key UploadId Initiated",
}  # fmt: skip


def connect(scheme: str, where: Endpoint, connections: int, read_timeout: float) -> Any:
    """Return boto3's S3 client. Raises BadInput if boto3 is not installed, and any exception of boto3.

    The credentials are those that boto3 reads (AWS_*, its files, roles), and OBS_ACCESS_KEY_ID,
    OBS_SECRET_ACCESS_KEY and OBS_SECURITY_TOKEN. The client makes one attempt at each request; Requests
    retries. (Measured: with boto3's "adaptive" retries, whose limiter all threads share, 70 requests of 16
    threads took 67 s and failed when bursts of 503 hit 60 % of them. Our retries took 7 s; 2 cores, moto.)

    scheme: "s3" or "obs".
    where: the server.
    connections: the size of the connection pool.
    read_timeout: seconds without a byte.
    """
    boto3 = import_optional("boto3", "object stores need boto3")
    from botocore.config import Config

    keys = {}
    given = os.environ.get("OBS_ACCESS_KEY_ID")
    if given and (scheme == "obs" or not os.environ.get("AWS_ACCESS_KEY_ID")):
        keys = {
            "aws_access_key_id": given,
            "aws_secret_access_key": os.environ.get("OBS_SECRET_ACCESS_KEY"),
            "aws_session_token": os.environ.get("OBS_SECURITY_TOKEN") or None,
        }
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=where.url,
        region_name=where.region,
        config=Config(
            connect_timeout=_CONNECT_TIMEOUT,
            read_timeout=read_timeout,
            retries={"mode": "standard", "total_max_attempts": 1},
            max_pool_connections=connections,
            s3={"addressing_style": where.style},
            # stores other than Amazon's do not know the newer checksums
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
        **keys,
    )
    if is_clear_text(client.meta.endpoint_url):  # boto3's files may also name an endpoint
        if os.environ.get(USE_HTTPS) != "0":
            raise BadInput(f"the endpoint {client.meta.endpoint_url} is not encrypted: {NEEDS_HTTPS}")
        _warn_of_clear_text(client.meta.endpoint_url)
    return client


@functools.cache
def _warn_of_clear_text(url: str) -> None:
    """Warn once per process."""
    print(f"warning: {url} is not encrypted: others on the network can read data and tokens", file=sys.stderr)


def ask(client: Any, operation: str, parameters: dict, timeout: float) -> dict:
    """Return the answer to an operation of boto3. Raises TimeoutError, and Damaged if it cannot be used."""
    future = Future[dict]()

    def work() -> None:  # in a thread: if single bytes arrive, no read of boto3 exceeds its time-out
        try:
            future.set_result(getattr(client, operation)(**parameters))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="request", daemon=True).start()
    seconds = _CONNECT_TIMEOUT + timeout + len(parameters.get("Body", b"")) / _SLOWEST
    if not wait([future], seconds + _JOINING * (operation == "complete_multipart_upload")).done:
        raise TimeoutError
    error = future.exception()
    if isinstance(error, Exception) and not explain(error, ""):  # for example an invalid date
        raise Damaged(f"the answer cannot be read ({type(error).__name__})") from error
    _check(operation, future.result(), parameters.get("Prefix", ""))
    return future.result()


def _check(operation: str, answer: dict, prefix: str) -> None:
    """Raise Damaged if an answer lacks a field, has an impossible size, or lists a key without the prefix."""
    for kind, names in _FIELDS.items():
        entries = [answer] if kind == operation else answer.get(kind, [])
        for entry, name in itertools.product(entries, names.split()):
            value = entry.get(name)
            if value in (None, "") or (isinstance(value, int) and not 0 <= value < 2**63):
                raise Damaged(f"the answer has no valid {name} ({value!r:.40})")
            if name in ("Key", "Prefix") and not value.startswith(prefix):
                raise Damaged(f"the answer lists {shown(value)}, which does not begin with {prefix}")


class Facts(NamedTuple):
    """The facts about an object in an answer. size in bytes; md5: None if the ETag is not an MD5."""

    size: int
    etag: str
    sha256: str | None
    md5: str | None


def read_facts(answer: dict) -> Facts:
    """Return the facts in the answer to a GET or HEAD."""
    sha256 = answer.get("Metadata", {}).get(SHA256, "").lower()
    return Facts(
        answer["ContentLength"],
        answer["ETag"].strip('"'),
        sha256 if re.fullmatch("[0-9a-f]{64}", sha256) else None,
        read_md5(answer),
    )


def is_range(answer: dict, first: int, last: int | None) -> bool:
    """Return whether an answer has bytes first..last of the object, or fewer at its end."""
    match = _RANGE.fullmatch(answer.get("ContentRange", ""))
    if not match:
        return False
    begin, end, size = map(int, match.groups())
    wanted = size - 1 if last is None else min(last, size - 1)
    return (begin, end, answer["ContentLength"]) == (first, wanted, wanted - first + 1)


def read_md5(answer: dict) -> str | None:
    """Return the MD5 in an ETag; None for multipart uploads and for encrypted objects."""
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    match = _MD5.fullmatch(answer["ETag"])
    return match[1] if match and not any("encryption" in name for name in headers) else None


def read_body(body: Any, size: int, timeout: float) -> Iterator[bytes]:
    """Yield the `size` bytes of a body as they arrive. Raises Damaged if it ends early or is too slow."""
    # read1() returns the bytes that have arrived. read() waits for a full chunk: if single bytes arrive, no
    # read exceeds the time-out, and the wait has no limit.
    raw = body._raw_stream
    take = raw.read1 if hasattr(raw, "read1") else body.read
    deadline = time.monotonic() + timeout + size / _SLOWEST
    left = size
    try:
        while left:
            chunk = take(min(_CHUNK, left))
            if not chunk:
                raise Damaged(f"the answer was cut: {size - left} of {size} bytes arrived")
            left -= len(chunk)
            yield chunk
            if time.monotonic() > deadline:
                raise Damaged(f"the answer is too slow: {size - left} of {size} bytes arrived in time")
    finally:
        with contextlib.suppress(Exception):
            if left:
                body.close()
            else:
                raw.release_conn()
