"""Copy the objects below a URL of an object store to this node's scratch disk, once and completely.

    <scratch>/bootfile-<uid>/staged/<bucket and prefix>-<digest>/
        data/     the files; named .data until all are complete
        .lock     exclusive while a process changes the copy, shared while jobs read it

One process of a node downloads, the others wait. The modification time of a file is computed from its object,
so a file with the size and the time of an object is complete. Every job compares all files before it reads
them: complete ones are used again, also those of a killed process. Changed objects are downloaded again, and
files of deleted objects are deleted.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, sync_folder
from bootfile.ground.heartbeat import Heartbeat
from common.distributed import barrier
from common.ground.shared_folders import locked
from common.object_store import sync
from common.object_store.location import SCRATCH, check_keys, scratch_folder
from common.object_store.store import Object, ObjectStore

_IN_USE = 60.0  # seconds to wait for another job to end
_SLACK = 4096  # bytes that a file may take on the disk in addition to its size
_Beat = Callable[[str], None]  # sends a heartbeat to the other processes, and to the log with this text

_locks = contextlib.ExitStack()  # shared locks of the copies, held until this process ends


@functools.cache
def stage(url: str) -> str:
    """Return the folder that holds all objects below the URL as files. Returns on every process of the job at
    the same time, however long one node takes. Raises BadInput on every process if one fails. The files'
    modification times are computed from the objects, so an index of one copy is valid for another. Every rank
    calls it, through local_folder(); the one with local rank 0 downloads for its node."""
    place = scratch_folder("staged", url)
    failure = None  # raised on every process at the next barrier
    folder = os.path.join(place, "data")
    try:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with explained(f"cannot stage {url} in {place}"):
                _complete(url, place)
    except BadInput as error:
        failure = error
    barrier.wait_for_all(f"staging {url}", f"to stage {url}", failure)
    if not os.path.isdir(folder):
        failure = BadInput(f"{folder} is missing: all processes of a node need the same {SCRATCH}")
    barrier.wait_for_all(f"reading {url}", f"to find the copy of {url}", failure)
    return folder


def _complete(url: str, place: str) -> None:
    """Make the copy complete, and hold a shared lock on it. Raises BadInput and OSError. The lock is held
    until this process ends, so no other job changes files that it reads."""
    data = os.path.join(place, "data")
    lock = os.path.join(place, ".lock")
    heartbeat = Heartbeat()
    waiting_since = None  # time.monotonic() when the wait for another job began

    def beat(text: str) -> None:
        """Tell the processes that wait at the barrier, and the log, that the work continues."""
        barrier.beat(f"staging {url}")
        heartbeat.beat(text)

    with ObjectStore(url) as store:
        objects = _list_objects(store, url, beat)
        while True:
            # the exclusive lock is free only if no other job reads or changes the copy
            with contextlib.suppress(BlockingIOError), locked(lock, wait=False):
                _update(store, url, data, objects, beat)
            # then a shared one, and the copy is compared again: another job may change it between the two
            with contextlib.suppress(BlockingIOError), contextlib.ExitStack() as stack:
                stack.enter_context(locked(lock, shared=True, wait=False))
                if not any(_compare(data, objects, beat)):
                    _locks.push(stack.pop_all())
                    return
                waiting_since = waiting_since or time.monotonic()
                if time.monotonic() - waiting_since > _IN_USE:
                    raise BadInput(
                        f"{url} has changed, and another job on this node reads the previous copy for "
                        f"{_IN_USE:.0f} s: wait until it has ended, or set {SCRATCH} to another folder"
                    )
            beat(f"waiting for {url}: another process on this node uses it")
            time.sleep(0.2)


def _list_objects(store: ObjectStore, url: str, beat: _Beat) -> list[Object]:
    """Return the objects below the URL, whose keys are checked. Raises BadInput if there are none, or if the
    store does not tell when an object changes."""
    objects = []
    for entry in store.list():
        if not (entry.etag or entry.modified):
            raise BadInput(
                f"{url}: the listing has neither ETag nor LastModified, so a changed object is not seen: "
                "download the data, and pass the folder"
            )
        objects.append(entry)
        beat(f"staging {url}: {len(objects)} objects listed")
    if not objects:
        raise BadInput(f"no objects below {url}")
    check_keys((entry.key for entry in objects), url)
    return objects


def _update(store: ObjectStore, url: str, data: str, objects: list[Object], beat: _Beat) -> None:
    """Make the folder `data` equal to the objects."""
    begin = time.monotonic()
    hidden = os.path.join(os.path.dirname(data), ".data")
    if os.path.isdir(data):
        if not any(_compare(data, objects, beat)):
            print(f"staged before: {url}, {len(objects)} files unchanged at {data}", flush=True)
            return
        # the name data/ stands for a complete copy: it is hidden as long as files are changed
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(data, hidden)
    missing, others = _compare(hidden, objects, beat)
    for path in others:
        os.unlink(path)
    for base, _, _ in os.walk(hidden, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(base)  # only if it is empty
    progress = _Lines(url, sum(entry.size for entry in missing), beat)
    # the old files are deleted, and nothing is fetched yet: a full disk would show only in the middle
    free = shutil.disk_usage(os.path.dirname(data)).free
    needed = progress.size + _SLACK * len(missing)
    if needed > free:
        raise BadInput(
            f"{url} needs {needed / 1e9:.3f} GB more on this node, {free / 1e9:.3f} GB are free at "
            f"{os.path.dirname(data)}: set {SCRATCH} to a folder on a larger disk"
        )
    os.makedirs(hidden, exist_ok=True)  # the loop above deletes it if it is empty

    def mark_complete(entry: Object, has_digest: bool) -> None:
        """Give a complete file the time of its object. Threads of sync.fetch() call it."""
        path = os.path.join(hidden, entry.key)
        time_ns = _time_of(entry)
        os.utime(path, ns=(time_ns, time_ns))
        if os.stat(path).st_mtime_ns != time_ns:  # every start would fetch it again
            raise BadInput(f"{path}: times of files are not kept here: set {SCRATCH} to a local disk")

    sync.fetch(store, hidden, missing, progress, after=mark_complete)
    os.rename(hidden, data)
    sync_folder(os.path.dirname(data))
    seconds = time.monotonic() - begin
    print(
        f"staged {url}: {len(objects)} files, {len(missing)} fetched, {progress.size / 1e9:.3f} GB in "
        f"{seconds:.1f} s ({progress.size / seconds / 1e6:.1f} MB/s), {len(others)} removed: {data}",
        flush=True,
    )


class _Lines(sync.Progress):
    """Sends a heartbeat with the bytes that have arrived. size: all bytes."""

    def __init__(self, url: str, size: int, beat: _Beat):
        super().__init__()
        self.size = size
        self._url = url
        self._beat = beat

    def report(self) -> None:
        """Send the heartbeat."""
        rate = self.count / self.seconds / 1e6
        part = f"{self.count / 1e9:.3f} of {self.size / 1e9:.3f} GB"
        self._beat(f"staging {self._url}: {part}, {rate:.1f} MB/s")


def _compare(data: str, objects: list[Object], beat: _Beat) -> tuple[list[Object], list[str]]:
    """Return (objects without a complete file in the folder, paths in it that are not in the store). A file
    is complete if it has the size and the time of its object. No request is sent for it, so this thread
    compares all of them."""
    missing = []
    for entry in objects:
        state = None
        with contextlib.suppress(OSError):
            status = os.lstat(os.path.join(data, entry.key))
            state = stat.S_ISREG(status.st_mode), status.st_size, status.st_mtime_ns
        if state != (True, entry.size, _time_of(entry)):
            missing.append(entry)
        beat(f"comparing {len(objects)} files with {data}")
    keys = {entry.key for entry in objects}
    files = sync.list_files(data) if os.path.isdir(data) else []  # a killed process may have renamed it
    return missing, [file.path for file in files if os.path.relpath(file.path, data) not in keys]


def _time_of(entry: Object) -> int:
    """Return the modification time of an object's file in nanoseconds: the object's second, with a fraction
    that depends on the content."""
    part = int(hashlib.sha256(entry.etag.encode()).hexdigest()[:8], 16) % 10**9
    return int(entry.modified) * 10**9 + part
