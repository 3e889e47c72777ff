"""Send requests to an object store with a limited number of retries; an error is one line with the cause."""

import base64
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from common.exits import BadInput
from common.object_store.client import SHA256, Facts, ask, connect, is_range, read_body, read_facts, read_md5
from common.object_store.errors import Damaged, StoreError, explain
from common.object_store.location import Location, find_endpoint

T = TypeVar("T")

_LARGEST = 2**30  # bytes of an object that is read into memory
_GAIN = 2**20  # bytes: an attempt that received this many resets the count of failures
_WAIT, _LONGEST_WAIT = 0.5, 20.0  # seconds: upper limits of the first pause and of any pause


class Requests:
    """boto3's operations on one bucket. Threads can share it; it can be pickled and survives a fork."""

    def __init__(self, location: Location, threads: int):
        self.location, self.threads = location, threads
        self.attempts = int(_number("BOOTFILE_STORE_ATTEMPTS", 5))
        self.timeout = _number("BOOTFILE_STORE_TIMEOUT", 30)
        self.endpoint = find_endpoint(location.scheme)
        self._begin()

    def _begin(self) -> None:
        self._pid, self._client, self._quiet = os.getpid(), None, 0.0
        self._pool: ThreadPoolExecutor | None = None
        self._lock, self.stopped = threading.Lock(), threading.Event()

    def __getstate__(self) -> dict:
        return {
            name: getattr(self, name) for name in ("location", "threads", "attempts", "timeout", "endpoint")
        }

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._begin()

    def call(self, operation: str, key: str, **parameters) -> dict:
        """Run an operation of boto3 on the bucket, with retries. key: for messages. Raises StoreError."""
        return self.retry(key, lambda: self._once(operation, parameters))

    def retry(self, key: str, function: Callable[[], T]) -> T:
        """Return function(). Retry it after a pause if that can help, otherwise raise StoreError."""
        failed = 0
        while True:
            try:
                return function()
            except Exception as error:
                failed += 1
                self.pause_after(error, key, failed)

    def pause_after(self, error: Exception, key: str, failed: int) -> None:
        """Wait before the next attempt. Raises StoreError if a retry cannot help or the attempts are used up.

        failed: the number of failed attempts. An exception with another cause is raised as it is.
        """
        if isinstance(error, BadInput):
            raise error
        trouble = explain(error, self.endpoint.shown)
        if trouble is None:
            raise error
        # A store that is too busy answers at once and recovers, so it gets more attempts.
        if not trouble.again or failed >= self.attempts * (2 if trouble.busy else 1):
            times = f", {failed} times" if failed > 1 else ""
            raise StoreError(f"{self.location.url(key)}: {trouble.cause}{times}", trouble.reason) from error
        # random: otherwise threads that fail together retry together
        pause = random.uniform(0, min(_LONGEST_WAIT, _WAIT * 2 ** (failed - 1)))
        if trouble.busy:
            self._quiet = time.monotonic() + pause
        self.stopped.wait(pause)
        self.check_stopped(key)

    def check_stopped(self, key: str) -> None:
        if self.stopped.is_set():
            raise StoreError(f"{self.location.url(key)}: interrupted", "interrupted")

    def read_object(
        self, key: str, size: int | None = None, sha256: str | None = None
    ) -> tuple[bytes, Facts]:
        """Read a small object and check it against its metadata, or against the given size and sha256."""
        taken = []  # the sha256 of earlier attempts

        def attempt():
            body, facts = self._get(key, {})
            self.expect_size(key, facts, size)
            if facts.size > _LARGEST:
                raise Damaged(f"it has {facts.size} bytes, expected at most {_LARGEST}")
            content = b"".join(read_body(body, facts.size, self.timeout))
            found = hashlib.sha256(content).hexdigest()
            self.compare(
                found, lambda: hashlib.md5(content, usedforsecurity=False).hexdigest(), sha256, facts, taken
            )
            return content, facts._replace(sha256=found)

        return self.retry(key, attempt)

    def read_range(self, key: str, first: int, size: int | None, etag: str | None = None) -> bytes:
        """Read `size` bytes from byte `first`, fewer at the end of the object (None: up to its end).

        etag: the ETag that the object must have.
        """
        content, failed, wanted = bytearray(), 0, size
        condition = {"IfMatch": etag} if etag else {}
        while wanted is None or len(content) < wanted:
            self.check_stopped(key)
            before = len(content)
            last = None if wanted is None else first + wanted - 1
            try:
                body, facts = self._get(key, condition, (first + before, last))
                wanted = before + facts.size
                for chunk in read_body(body, facts.size, self.timeout):
                    content += chunk
            except Exception as error:
                failed = 1 if len(content) - before >= _GAIN else failed + 1
                self.pause_after(error, key, failed)
        return bytes(content)

    def put(self, key: str, content: bytes, sha256: str, **condition: str) -> str:
        """Store bytes under a key, and return the ETag. condition: IfMatch or IfNoneMatch."""
        return self.upload(key, "put_object", content, Metadata={SHA256: sha256}, **condition)

    def upload(self, key: str, operation: str, content: bytes, **parameters) -> str:
        """Send bytes as an object or a part, and return the ETag.

        The store checks the bytes against their MD5, and the ETag that it returns is also checked.
        """
        digest = hashlib.md5(content, usedforsecurity=False)
        checksum = base64.b64encode(digest.digest()).decode()

        def attempt() -> str:
            self.check_stopped(key)
            answer = self._once(
                operation,
                {"Key": self.location.full(key), "Body": content, "ContentMD5": checksum} | parameters,
            )
            if read_md5(answer) not in (None, digest.hexdigest()):
                raise Damaged("the store received other bytes than those that were sent")
            return answer["ETag"]

        return self.retry(key, attempt)

    def compare(
        self, found: str, md5: Callable[[], str], sha256: str | None, facts: Facts, taken: list[str]
    ) -> None:
        """Raise Damaged if received bytes are not the expected ones.

        They are compared with `sha256`, or the sha256 of the metadata, or the MD5 in the ETag. Not every
        store's ETag is an MD5, so without a sha256 the same bytes in two attempts are accepted.

        found: the sha256 of the bytes.
        md5: returns the MD5 of the bytes.
        sha256: the expected sha256, if it is known.
        facts: the facts in the answer.
        taken: the sha256 of earlier attempts; `found` is appended.
        """
        wanted = sha256 or facts.sha256
        plausible = not wanted and (facts.md5 is None or found in taken or md5() == facts.md5)
        fine = plausible or found == wanted
        taken.append(found)
        if not fine:
            kind, right = ("sha256", wanted) if wanted else ("MD5", facts.md5 or "")
            raise Damaged(
                f"the received bytes are not those that were sent ({kind} {right[:12]}... expected)"
            )

    def expect_size(self, key: str, facts: Facts, size: int | None) -> None:
        if size is not None and facts.size != size:
            raise StoreError(
                f"{self.location.url(key)}: it has {facts.size} bytes, expected {size}: it was replaced",
                "replaced",
            )

    def _get(self, key: str, parameters: dict, asked: tuple[int, int | None] | None = None):
        """Return the body of an object and its facts (size: of the body). asked: the first and last byte."""
        self.check_stopped(key)
        if asked:
            parameters = {"Range": f"bytes={asked[0]}-{'' if asked[1] is None else asked[1]}"} | parameters
        answer = self._once("get_object", {"Key": self.location.full(key)} | parameters)
        if asked and not is_range(answer, *asked):
            answer["Body"].close()
            raise Damaged(f"the answer is not the requested range from byte {asked[0]}")
        return answer["Body"], read_facts(answer)

    def _once(self, operation: str, parameters: dict) -> dict:
        quiet = self._quiet - time.monotonic()
        if quiet > 0:  # the store asked another thread to slow down
            self.stopped.wait(quiet)
        parameters = {"Bucket": self.location.bucket} | parameters
        return ask(self.client, operation, parameters, self.timeout)

    @property
    def client(self) -> Any:
        if self._pid != os.getpid():  # after a fork: connections and threads belong to the parent
            self._begin()
        with self._lock:
            if self._client is None:
                self._client = connect(self.location.scheme, self.endpoint, 2 * self.threads, self.timeout)
            return self._client

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Return the thread pool. Its tasks must not wait for other tasks of the pool."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads, "object-store")
            return self._pool

    def close(self) -> None:
        with self._lock:
            pool, client, self._pool, self._client = self._pool, self._client, None, None
        if self._pid == os.getpid():
            if pool:
                pool.shutdown(cancel_futures=True)
            if client:
                client.close()


def _number(name: str, default: float) -> float:
    try:
        value = float(os.environ.get(name) or default)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise BadInput(f"{name}={os.environ[name]} is not a number above 0")
    return value
