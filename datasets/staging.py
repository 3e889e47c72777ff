"""Copy the objects below a URL of an object store to this node's scratch disk, once and completely.

    <scratch>/bootfile-<uid>/staged/<bucket and prefix>-<digest>/
        data/           the files; named .data until all are complete
        journal.jsonl   [key, size, etag, sha256, mtime in ns] of each complete file
        state.json      when the store was last listed

One process of a node downloads, the others wait. The files that a killed process completed are checked
against the journal and kept. A complete copy is used again: changed objects are downloaded again, and files
of deleted objects are deleted.
"""

import concurrent.futures
import contextlib
import functools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from common.checkpoint import output_list
from common.distributed import barrier
from common.exits import BadInput
from common.files import locked, sync_folder, write_atomic
from common.heartbeat import Heartbeat
from common.object_store.errors import shown
from common.object_store.paths import SCRATCH, check_keys, is_partial, scratch_folder
from common.object_store.store import Object, ObjectStore
from datasets.staged_copy import StagedCopy, format_line, read_boot_id, read_clock, time_of

THREADS = 16
MANIFESTS = ("manifest.json", output_list.NAME)  # they list size and sha256 of the uploaded files
_IN_USE = 60.0  # seconds to wait for another job to end
_LARGEST_MANIFEST = 2**30  # bytes
_SLACK = 4096  # bytes that a file may take on the disk in addition to its size

_began = read_clock()
_staged: dict[str, str] = {}
_leases: dict[str, contextlib.ExitStack] = {}  # folder: a shared lock for as long as this process lives


def stage(url: str) -> str:
    """Return the folder that holds all objects below the URL as files.

    Returns on every process of the job at the same time, however long one node takes. Raises BadInput on
    every process if one fails. The files' modification times are computed from the objects, so an index of
    one copy is valid for another.
    """
    if url in _staged:
        return _staged[url]
    folder, trouble = "", None
    try:
        folder = _Staging(url).run()
    except BadInput as error:
        trouble = error
    except OSError as error:
        trouble = BadInput(f"cannot stage {url}: {error.strerror or error} ({error.filename})")
    barrier.wait_for_all(f"staging {url}", f"to stage {url}", trouble)
    _staged[url] = folder
    return folder


class _Staging:
    def __init__(self, url: str):
        self.url, self.place = url, scratch_folder("staged", url)
        self.copy = StagedCopy(self.place)
        self.begin, self.heartbeat = time.monotonic(), Heartbeat()
        self.store = ObjectStore(url, THREADS)
        self._lock, self._bytes, self._files, self._total = threading.Lock(), 0, 0, 0

    def run(self) -> str:
        with self.store, self._alone("lock", "another process on this node stages it"):
            listed = self.copy.listed_at()
            if listed is None or listed < _began or not os.path.isdir(self.copy.data):
                self._update()
            if self.place not in _leases:
                _leases[self.place] = contextlib.ExitStack()
                _leases[self.place].enter_context(locked(self._path("lease"), shared=True))
        return self.copy.data

    def _update(self) -> None:
        listed = read_clock()
        objects = []
        for entry in self.store.list():
            objects.append(entry)
            self._alive(f"staging {self.url}: {len(objects)} objects listed")
        if not objects:
            raise BadInput(f"no objects below {self.url}")
        check_keys((entry.key for entry in objects), self.url)
        checksums = self._checksums(objects)
        whole = os.path.isdir(self.copy.data)
        if not whole:
            os.makedirs(self.copy.hidden, exist_ok=True)
        entries = self.copy.entries()
        folder = self.copy.data if whole else self.copy.hidden
        with concurrent.futures.ThreadPoolExecutor(THREADS, "look") as pool:
            has = functools.partial(self.copy.has, folder, entries=entries)
            look = pool.map(lambda entry: has(entry, sha256=checksums.get(entry.key)), objects)
            there = []
            for each in look:
                there.append(each)
                self._alive(f"staging {self.url}: {len(there)} of {len(objects)} files checked")
        missing = [entry for entry, here in zip(objects, there, strict=True) if not here]
        gone, begun = self.copy.others(folder, objects)
        if whole and not missing and not gone:
            print(
                f"staged before: {self.url}, {len(objects)} files unchanged at {self.copy.data}", flush=True
            )
        else:
            self._change(objects, missing, gone, begun, entries, checksums)
        state = {"url": self.url, "files": len(objects), "boot": read_boot_id(), "listed": listed}
        write_atomic(os.path.join(self.place, "state.json"), json.dumps(state))

    def _change(
        self,
        objects: list[Object],
        missing: list[Object],
        gone: list[str],
        begun: int,
        entries: dict[str, tuple],
        checksums: dict[str, str],
    ) -> None:
        if lease := _leases.pop(self.place, None):  # this process has staged the URL before
            lease.close()
        with self._alone("lease", "another job on this node reads the previous copy", _IN_USE):
            if os.path.isdir(self.copy.data):
                shutil.rmtree(self.copy.hidden, ignore_errors=True)
                os.rename(self.copy.data, self.copy.hidden)
        for path in gone:
            os.unlink(path)
            entries.pop(os.path.relpath(path, self.copy.hidden), None)
        self._check_room(missing, begun)
        keys = {entry.key for entry in objects} - {entry.key for entry in missing}
        write_atomic(self.copy.journal, "".join(format_line(key, *entries[key]) for key in sorted(keys)))
        self._fetch(missing, checksums)
        for base, _, names in os.walk(self.copy.hidden, topdown=False):
            for name in filter(is_partial, names):  # parts of another version of the object
                os.unlink(os.path.join(base, name))
            with contextlib.suppress(OSError):
                os.rmdir(base)  # only if it is empty
        sync_folder(self.copy.hidden)
        os.rename(self.copy.hidden, self.copy.data)
        sync_folder(self.place)
        seconds = time.monotonic() - self.begin
        size = sum(entry.size for entry in missing)
        print(
            f"staged {self.url}: {len(objects)} files, {len(missing)} fetched, {size / 1e9:.3f} GB in "
            f"{seconds:.1f} s ({size / seconds / 1e6:.1f} MB/s), {len(gone)} removed: {self.copy.data}",
            flush=True,
        )

    def _fetch(self, missing: list[Object], checksums: dict[str, str]) -> None:
        self._total, self._all = len(missing), sum(entry.size for entry in missing)
        for entry in missing:  # an old folder of that name: empty, or with unfinished downloads
            shutil.rmtree(os.path.join(self.copy.hidden, entry.key), ignore_errors=True)
        for folder in sorted({os.path.dirname(entry.key) for entry in missing}):
            os.makedirs(os.path.join(self.copy.hidden, folder), exist_ok=True)
        waiting = iter(missing)
        pool = concurrent.futures.ThreadPoolExecutor(THREADS, "stage")
        with open(self.copy.journal, "a", encoding="utf-8") as journal:
            running = set()
            try:
                while True:
                    for entry in waiting:
                        running.add(pool.submit(self._one, entry, checksums.get(entry.key), journal))
                        if len(running) >= 4 * THREADS:
                            break
                    if not running:
                        break
                    done, running = concurrent.futures.wait(running, 1.0, concurrent.futures.FIRST_COMPLETED)
                    for each in done:
                        each.result()
                    self._alive(self._progress)
            except BaseException:
                self.store.stop()  # the running requests end soon
                raise
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _one(self, entry: Object, sha256: str | None, journal: TextIO) -> None:
        path = os.path.join(self.copy.hidden, entry.key)
        found = self.store.fetch(entry.key, path, entry.size, sha256, self._received)
        os.utime(path, ns=(time_of(entry),) * 2)
        with self._lock:
            journal.write(format_line(entry.key, entry.size, entry.etag, found, time_of(entry)))
            journal.flush()
            self._files += 1

    def _received(self, size: int) -> None:
        with self._lock:
            self._bytes += size

    def _progress(self) -> str:
        rate = self._bytes / (time.monotonic() - self.begin) / 1e6
        return (
            f"staging {self.url}: {self._files} of {self._total} files, {self._bytes / 1e9:.3f} of "
            f"{self._all / 1e9:.3f} GB, {rate:.1f} MB/s"
        )

    def _check_room(self, missing: list[Object], begun: int) -> None:
        space = os.statvfs(self.copy.hidden)
        free = space.f_bavail * space.f_frsize
        needed = sum(entry.size + _SLACK for entry in missing) - begun
        if needed > free:
            raise BadInput(
                f"{self.url} needs {needed / 1e9:.3f} GB more on this node, {free / 1e9:.3f} GB are free at "
                f"{self.place}: set {SCRATCH} to a folder on a larger disk"
            )
        if space.f_files and len(missing) > space.f_favail:
            raise BadInput(
                f"{self.url} needs {len(missing)} more files, {self.place} has room for {space.f_favail}: "
                f"set {SCRATCH} to a folder on another disk"
            )

    def _checksums(self, objects: list[Object]) -> dict[str, str]:
        """Return key -> sha256, from the manifests that uploads write."""
        sizes, found = {entry.key: entry.size for entry in objects}, {}
        for name in MANIFESTS:
            if not 0 < sizes.get(name, 0) <= _LARGEST_MANIFEST:
                continue
            content = self.store.read(name)
            try:
                _, listed = output_list.parse(content)
            except ValueError:  # another program's file of that name
                continue
            for key, (size, sha256) in listed.items():
                if key in sizes:
                    if name == MANIFESTS[0] and sizes[key] != size:
                        raise BadInput(
                            f"{self.url}: {shown(key)!r} has {sizes[key]} bytes, {name} says {size}: it was "
                            f"changed after the upload; upload it again, or remove {name}"
                        )
                    if sizes[key] == size:
                        found[key] = sha256
        return found

    def _alive(self, text: str | Callable[[], str]) -> None:
        """Send a heartbeat to the other processes and to the log."""
        barrier.beat(f"staging {self.url}")
        self.heartbeat.beat(text)

    @contextlib.contextmanager
    def _alone(self, name: str, why: str, seconds: float = float("inf")) -> Iterator[None]:
        """Hold a lock of this node. Other processes may hold it for up to `seconds`."""
        begin = time.monotonic()
        with contextlib.ExitStack() as lock:
            while True:
                with contextlib.suppress(BlockingIOError):
                    lock.enter_context(locked(self._path(name), wait=False))
                    break
                if time.monotonic() - begin > seconds:
                    raise BadInput(
                        f"{self.url} has changed, and {why} for {seconds:.0f} s: wait until it has ended, or "
                        f"set {SCRATCH} to another folder"
                    )
                time.sleep(0.1)
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    self._alive(f"waiting for {self.url}: {why}")
                else:
                    barrier.beat(f"staging {self.url}")
            yield

    def _path(self, name: str) -> str:
        return os.path.join(self.place, f".{name}")
