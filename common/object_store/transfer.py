"""Download and upload files of an object store atomically; big files in parts.

A downloaded file gets its name by a rename. A killed process leaves `.bootfile-<hash>.partial` in the same
folder with the first bytes of the object. The next fetch continues with it; sweep() deletes it.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, BinaryIO

from common.exits import BadInput
from common.object_store.client import SHA256, Facts, read_facts
from common.object_store.errors import Damaged, StoreError, of_the_disk, shown
from common.object_store.paths import PartialFile, finish
from common.object_store.requests import Requests

_FETCHED = 2**22  # bytes of a downloaded part
_AHEAD = 4  # concurrent downloads of parts for a file: they are written in order, without gaps
Progress = Callable[[int], object]  # called with the number of bytes that have arrived
_SENT, _MOST_PARTS = 2**23, 9000  # bytes of an uploaded part; parts of a file (stores accept 10,000)


def fetch(requests: Requests, key: str, path: str, size: int, sha256: str | None, progress: Progress) -> str:
    """Implement ObjectStore.fetch()."""
    try:
        if os.path.isdir(path):
            raise BadInput(f"{requests.location.url(key)}: its file is a folder on this node ({path})")
        if size <= _FETCHED:
            content, facts = requests.read_object(key, size, sha256)
            with PartialFile(path, path) as file:
                file.truncate(0)
                file.write(content)
                finish(file, path)
            progress(size)
            return facts.sha256 or ""
        answer = requests.call("head_object", key, Key=requests.location.full(key))
        facts = read_facts(answer)
        requests.expect_size(key, facts, size)
        with PartialFile(path, f"{path}\0{facts.etag}") as file:
            found = _all_parts(requests, key, file, facts, sha256, progress)
            finish(file, path)
            return found
    except OSError as error:
        raise of_the_disk(error, path) from error


def _all_parts(
    requests: Requests,
    key: str,
    file: BinaryIO,
    facts: Facts,
    sha256: str | None,
    progress: Progress,
) -> str:
    """Download the rest of the object to the hidden file. Return the sha256 of the whole."""
    taken, failed = [], 0
    while True:
        resumed = os.fstat(file.fileno()).st_size
        if resumed > facts.size:
            file.truncate(0)
            resumed = 0
        hashes = [hashlib.sha256(), hashlib.md5(usedforsecurity=False)]
        file.seek(0)
        while chunk := file.read(2**20):
            for each in hashes:
                each.update(chunk)
        progress(resumed)
        for part in _parts(requests, key, resumed, facts):
            file.write(part)
            file.flush()
            for each in hashes:
                each.update(part)
            progress(len(part))
        found = hashes[0].hexdigest()
        try:
            requests.compare(found, hashes[1].hexdigest, sha256, facts, taken)
            return found
        except Damaged as error:
            file.truncate(0)
            progress(-facts.size)
            failed += not resumed  # bytes of an earlier process may be wrong: not a failed attempt
            if failed:
                requests.pause_after(error, key, failed)


def _parts(requests: Requests, key: str, first: int, facts: Facts):
    """Yield the parts from byte `first` in order; a few are downloaded concurrently."""
    starts, pending = iter(range(first, facts.size, _FETCHED)), deque()

    def ask() -> None:
        start = next(starts, None)
        if start is not None:
            size = min(_FETCHED, facts.size - start)
            pending.append(requests.pool.submit(requests.read_range, key, start, size, facts.etag))

    try:
        for _ in range(_AHEAD):
            ask()
        while pending:
            part = pending.popleft().result()
            ask()
            yield part
    finally:
        for future in pending:
            future.cancel()


def send(store: Any, path: str, key: str, sha256: str | None, progress: Progress) -> str:
    """Implement ObjectStore.send(). store: the ObjectStore."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _SENT:
                return _send_parts(store, file, key, size, sha256, progress)
            content = file.read(_SENT + 1)
    except OSError as error:
        raise of_the_disk(error, path) from error
    found = hashlib.sha256(content).hexdigest()
    if sha256 not in (None, found) or len(content) != size:
        raise _changed(path)
    store.requests.put(key, content, found)
    progress(size)
    return found


def _changed(path: str) -> BadInput:
    return BadInput(f"{shown(path)} has changed since its sha256 was computed: it is not uploaded")


def _send_parts(
    store: Any,
    file: BinaryIO,
    key: str,
    size: int,
    sha256: str | None,
    progress: Progress,
) -> str:
    """Upload a file in parts. It is read twice, because the sha256 is sent before the first part."""
    requests, full = store.requests, store.location.full(key)
    length = max(_SENT, -(-size // _MOST_PARTS))
    whole, digests = hashlib.sha256(), []
    while chunk := file.read(length):
        whole.update(chunk)
        digests.append(hashlib.sha256(chunk).digest())
    found = whole.hexdigest()
    if sha256 not in (None, found) or len(digests) != -(-size // length):
        raise _changed(file.name)
    answer = requests.call("create_multipart_upload", key, Key=full, Metadata={SHA256: found})
    upload = answer["UploadId"]

    def part(number: int) -> dict:
        content = os.pread(file.fileno(), length, number * length)
        if hashlib.sha256(content).digest() != digests[number]:
            raise _changed(file.name)
        etag = requests.upload(key, "upload_part", content, UploadId=upload, PartNumber=number + 1)
        progress(len(content))
        return {"ETag": etag, "PartNumber": number + 1}

    futures = [requests.pool.submit(part, number) for number in range(len(digests))]
    try:
        parts = [future.result() for future in futures]
        requests.call(
            "complete_multipart_upload", key, Key=full, UploadId=upload, MultipartUpload={"Parts": parts}
        )
    except BaseException as error:
        for future in futures:
            future.cancel()
        wait(futures)  # a part that arrives after the abort would be stored, and billed, for ever
        if isinstance(error, StoreError) and error.reason == "NoSuchUpload":
            there = store.head(key)
            if there and (there.size, there.sha256) == (size, found):
                return found  # the answer to an earlier attempt was lost, or another process sent the file
        try:
            store.abort(key, upload)
        except StoreError as another:
            raise StoreError(
                f"{error}; its unfinished upload is still there: `python -m launch clean` removes it"
            ) from another
        raise
    for _, earlier, _ in store.uploads(key):  # of killed processes: they would be billed for ever
        store.abort(key, earlier)
    return found
