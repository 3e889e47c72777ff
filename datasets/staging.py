"""Copy the objects below a URL of an object store to this node's scratch disk, once and completely.

    <scratch>/bootfile-<uid>/staged/<bucket and prefix>-<digest>/
        data/     the files; named .data until all are complete
        .lock     exclusive while a process changes the copy, shared while jobs read it

One process of a node downloads, the others wait. The modification time of a file is computed from its object,
so a file with the size and the time of an object is complete. A complete copy is used again, and so are the
files that a killed process completed. Changed objects are downloaded again, and files of deleted objects are
deleted.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable

from common.distributed import barrier
from common.ground.exits import BadInput
from common.ground.files import locked, sync_folder
from common.ground.heartbeat import Heartbeat
from common.object_store import parallel
from common.object_store.paths import SCRATCH, check_keys, scratch_folder
from common.object_store.store import Object, ObjectStore

THREADS = 16
_IN_USE = 60.0  # seconds to wait for another job to end
_SLACK = 4096  # bytes that a file may take on the disk in addition to its size

_staged: dict[str, str] = {}
_locks = contextlib.ExitStack()  # shared locks of the copies, held until this process ends


def stage(url: str) -> str:
    """Return the folder that holds all objects below the URL as files.

    Returns on every process of the job at the same time, however long one node takes. Raises BadInput on
    every process if one fails. The files' modification times are computed from the objects, so an index of
    one copy is valid for another.
    """
    if url in _staged:
        return _staged[url]
    place, trouble = scratch_folder("staged", url), None
    folder = os.path.join(place, "data")
    try:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with ObjectStore(url, THREADS) as store:
                _Staging(url, place, store).run()
    except BadInput as error:
        trouble = error
    except OSError as error:
        trouble = BadInput(f"cannot stage {url}: {error.strerror or error} ({error.filename})")
    barrier.wait_for_all(f"staging {url}", f"to stage {url}", trouble)
    if not os.path.isdir(folder):
        trouble = BadInput(f"{folder} is missing: all processes of a node need the same {SCRATCH}")
    barrier.wait_for_all(f"reading {url}", f"to find the copy of {url}", trouble)
    _staged[url] = folder
    return folder


class _Staging:
    def __init__(self, url: str, place: str, store: ObjectStore):
        self.url, self.place, self.store, self.heartbeat = url, place, store, Heartbeat()
        self.data, self.hidden = os.path.join(place, "data"), os.path.join(place, ".data")
        self._lock, self._bytes, self._files = threading.Lock(), 0, 0

    def run(self) -> None:
        """Make the copy complete, and take the shared lock. Raises BadInput and OSError."""
        objects, begin = self._list(), None
        while True:
            if lock := self._try_lock(shared=False):
                with lock:
                    self._update(objects)
            if lock := self._try_lock(shared=True):
                with lock:
                    if not any(self._compare(self.data, objects)):
                        _locks.push(lock.pop_all())
                        return
                begin = begin or time.monotonic()
                if time.monotonic() - begin > _IN_USE:
                    raise BadInput(
                        f"{self.url} has changed, and another job on this node reads the previous copy for "
                        f"{_IN_USE:.0f} s: wait until it has ended, or set {SCRATCH} to another folder"
                    )
            self._alive(f"waiting for {self.url}: another process on this node uses it")
            time.sleep(0.2)

    def _try_lock(self, shared: bool) -> contextlib.ExitStack | None:
        lock = contextlib.ExitStack()
        try:
            lock.enter_context(locked(os.path.join(self.place, ".lock"), shared, wait=False))
        except BlockingIOError:
            return None
        return lock

    def _list(self) -> list[Object]:
        objects = []
        for entry in self.store.list():
            objects.append(entry)
            self._alive(f"staging {self.url}: {len(objects)} objects listed")
        if not objects:
            raise BadInput(f"no objects below {self.url}")
        check_keys((entry.key for entry in objects), self.url)
        return objects

    def _compare(self, folder: str, objects: list[Object]) -> tuple[list[Object], list[str]]:
        """Return (objects without a complete file in the folder, paths in it that are not in the store)."""
        missing = []
        for entry in objects:
            if not _is_complete(os.path.join(folder, entry.key), entry):
                missing.append(entry)
            self._alive(f"staging {self.url}: comparing {len(objects)} files")
        keys = {entry.key for entry in objects}
        paths = (os.path.join(base, name) for base, _, names in os.walk(folder) for name in names)
        return missing, [path for path in paths if os.path.relpath(path, folder) not in keys]

    def _update(self, objects: list[Object]) -> None:
        begin = time.monotonic()
        if os.path.isdir(self.data):
            if not any(self._compare(self.data, objects)):
                print(f"staged before: {self.url}, {len(objects)} files unchanged at {self.data}", flush=True)
                return
            shutil.rmtree(self.hidden, ignore_errors=True)
            os.rename(self.data, self.hidden)
        os.makedirs(self.hidden, exist_ok=True)
        missing, others = self._compare(self.hidden, objects)
        for path in others:
            os.unlink(path)
        self._check_room(missing)
        for entry in missing:  # an old folder of that name
            shutil.rmtree(os.path.join(self.hidden, entry.key), ignore_errors=True)
        for folder in {os.path.dirname(entry.key) for entry in missing}:
            os.makedirs(os.path.join(self.hidden, folder), exist_ok=True)
        size = sum(entry.size for entry in missing)

        def describe() -> str:
            rate = self._bytes / (time.monotonic() - begin) / 1e6
            return (
                f"staging {self.url}: {self._files} of {len(missing)} files, {self._bytes / 1e9:.3f} of "
                f"{size / 1e9:.3f} GB, {rate:.1f} MB/s"
            )

        fetches = (functools.partial(self._fetch, entry) for entry in missing)
        parallel.run(self.store, fetches, lambda: self._alive(describe))
        for base, _, _ in os.walk(self.hidden, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(base)  # only if it is empty
        sync_folder(self.hidden)
        os.rename(self.hidden, self.data)
        sync_folder(self.place)
        seconds = time.monotonic() - begin
        print(
            f"staged {self.url}: {len(objects)} files, {len(missing)} fetched, {size / 1e9:.3f} GB in "
            f"{seconds:.1f} s ({size / seconds / 1e6:.1f} MB/s), {len(others)} removed: {self.data}",
            flush=True,
        )

    def _fetch(self, entry: Object) -> None:
        path = os.path.join(self.hidden, entry.key)
        self.store.fetch(entry.key, path, entry.size, self._count)
        os.utime(path, ns=(_time_of(entry),) * 2)
        with self._lock:
            self._files += 1

    def _count(self, size: int) -> None:
        with self._lock:
            self._bytes += size

    def _check_room(self, missing: list[Object]) -> None:
        space = os.statvfs(self.hidden)
        free, needed = space.f_bavail * space.f_frsize, sum(entry.size + _SLACK for entry in missing)
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

    def _alive(self, text: str | Callable[[], str]) -> None:
        """Send a heartbeat to the other processes and to the log. text: as in Heartbeat.beat()."""
        barrier.beat(f"staging {self.url}")
        self.heartbeat.beat(text)


def _is_complete(path: str, entry: Object) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    state = (stat.S_ISREG(status.st_mode), status.st_size, status.st_mtime_ns)
    return state == (True, entry.size, _time_of(entry))


def _time_of(entry: Object) -> int:
    """Return the modification time of an object's file in nanoseconds: the object's second, with a fraction
    that depends on the content."""
    part = int(hashlib.sha256(entry.etag.encode()).hexdigest()[:8], 16) % 10**9
    return int(entry.modified) * 10**9 + part
