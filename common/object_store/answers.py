"""What an object store answers: the facts of an object, and its bytes, every one counted."""

import contextlib
import re
import time
from typing import NamedTuple

from common.object_store.errors import Damaged

SHA256 = "sha256"  # the name of the metadata
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_CHUNK = 2**18  # bytes
_SLOWEST = 2**14  # bytes per second: a body may take this long beside the time-out


class Facts(NamedTuple):
    """What an answer says of the object. md5: None where the ETag is none."""

    size: int
    etag: str
    sha256: str | None
    md5: str | None


def facts_of(answer: dict) -> Facts:
    """What the answer to a GET or HEAD says."""
    sha256 = answer.get("Metadata", {}).get(SHA256, "").lower()
    return Facts(
        answer["ContentLength"],
        answer["ETag"].strip('"'),
        sha256 if re.fullmatch("[0-9a-f]{64}", sha256) else None,
        md5_of(answer),
    )


def is_range(answer: dict, first: int, last: int | None) -> bool:
    """Whether an answer has these bytes of the object, or those up to its end."""
    match = _RANGE.fullmatch(answer.get("ContentRange", ""))
    if not match:
        return False
    end = int(match[3]) - 1
    return int(match[1]) == first and int(match[2]) == (end if last is None else min(last, end))


def md5_of(answer: dict) -> str | None:
    """The MD5 in an ETag; None for parts put together and for what is stored encrypted."""
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    match = _MD5.fullmatch(answer["ETag"])
    return match[1] if match and not any("encryption" in name for name in headers) else None


def drained(body, size: int, timeout: float) -> bytearray:
    content = bytearray()
    for chunk in chunks(body, size, timeout):
        content += chunk
    return content


def chunks(body, size: int, timeout: float):
    """The `size` bytes of a body as they arrive. Raises Damaged where it ends early or comes too slowly."""
    # Whatever has arrived, where urllib3 can: a full chunk of single bytes would never meet a time-out.
    raw = body._raw_stream
    take = raw.read1 if hasattr(raw, "read1") else body.read
    deadline = time.monotonic() + timeout + size / _SLOWEST
    left = size
    try:
        while left:
            chunk = take(min(_CHUNK, left))
            if not chunk:
                raise Damaged(f"the answer was cut: {size - left} of {size} bytes came")
            left -= len(chunk)
            yield chunk
            if time.monotonic() > deadline:
                raise Damaged(f"the answer is too slow: {size - left} of {size} bytes came in time")
    finally:
        with contextlib.suppress(Exception):
            if left:
                body.close()
            else:
                raw.release_conn()
