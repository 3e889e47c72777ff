"""What is below a URL of an object store, as files on this node's scratch disk: fetched once, and whole.

    <scratch>/bootfile-<uid>/staged/<bucket and prefix>-<digest>/
        data/           the files; called .data while something is missing or is being changed
        journal.jsonl   [key, size, etag, sha256, mtime in ns] of each file that is there
        state.json      when the store was last looked at

One process of a node fetches, the others wait. What a killed one has finished stays: its bytes are compared
with the journal, and the rest is fetched. A copy that is whole is used again where the store lists the same
objects; what has changed there is fetched again, and what is gone there goes.
"""

import concurrent.futures
import contextlib
import fcntl
import functools
import json
import os
import shutil
import threading
import time

from common.checkpoint import output_list
from common.distributed import barrier
from common.exits import BadInput
from common.object_store.errors import shown
from common.object_store.paths import SCRATCH, check_keys, is_partial, scratch_folder
from common.object_store.store import Object, ObjectStore
from datasets.staged_copy import StagedCopy, boot, clock, line, sync, time_of

THREADS = 16
MANIFESTS = ("manifest.json", output_list.NAME)  # with sizes and sha256 of what was uploaded
_SAY_EVERY = 30.0  # seconds: a silent job is taken for a hung one
_IN_USE = 60.0  # seconds for another job to end
_LARGEST_MANIFEST = 2**30  # bytes
_SLACK = 4096  # bytes a file may take on the disk beyond its own

_began = clock()
_staged: dict[str, str] = {}
_leases = []  # files that are locked as long as this process lives


def stage(url: str) -> str:
    """The folder that holds all objects below the URL as files; every process of the job gets there at the
    same time, however long one node takes. Raises BadInput, on every process where one had trouble.

    The files' times of change follow from the objects, so an index made of one copy is good for another.
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
    barrier.everybody(f"staging {url}", f"to stage {url}", trouble)
    _staged[url] = folder
    return folder


class _Staging:
    def __init__(self, url: str):
        self.url, self.place = url, scratch_folder("staged", url)
        self.copy = StagedCopy(self.place)
        self.begin = self.said = time.monotonic()
        self.store = ObjectStore(url, THREADS)
        self._lock, self._bytes, self._files, self._total = threading.Lock(), 0, 0, 0

    def run(self) -> str:
        with self.store, self._alone("lock", "another process of this node stages it"):
            listed = self.copy.listed_at()
            if listed is None or listed < _began or not os.path.isdir(self.copy.data):
                self._update()
            lease = self._open("lease")
            fcntl.lockf(lease, fcntl.LOCK_SH)
            _leases.append(lease)
        return self.copy.data

    def _update(self) -> None:
        listed = clock()
        objects = []
        for entry in self.store.list():
            objects.append(entry)
            self._alive(f"staging {self.url}: {len(objects)} objects listed")
        if not objects:
            raise BadInput(f"there is nothing below {self.url}")
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
                self._alive(f"staging {self.url}: {len(there)} of {len(objects)} files looked at")
        missing = [entry for entry, here in zip(objects, there, strict=True) if not here]
        gone, begun = self.copy.others(folder, objects)
        if whole and not missing and not gone:
            print(
                f"staged before: {self.url}, {len(objects)} files unchanged at {self.copy.data}", flush=True
            )
        else:
            self._change(objects, missing, gone, begun, entries, checksums)
        state = {"url": self.url, "files": len(objects), "boot": boot(), "listed": listed}
        self.copy.write("state.json", json.dumps(state))

    def _change(self, objects, missing, gone, begun, entries, checksums) -> None:
        with self._alone("lease", "another job of this node reads the copy of before", _IN_USE):
            if os.path.isdir(self.copy.data):
                shutil.rmtree(self.copy.hidden, ignore_errors=True)
                os.rename(self.copy.data, self.copy.hidden)
        for path in gone:
            os.unlink(path)
            entries.pop(os.path.relpath(path, self.copy.hidden), None)
        self._check_room(missing, begun)
        keys = {entry.key for entry in objects} - {entry.key for entry in missing}
        self.copy.write("journal.jsonl", "".join(line(key, *entries[key]) for key in sorted(keys)))
        self._fetch(missing, checksums)
        for base, _, names in os.walk(self.copy.hidden, topdown=False):
            for name in filter(is_partial, names):  # of another version of the object
                os.unlink(os.path.join(base, name))
            with contextlib.suppress(OSError):
                os.rmdir(base)  # only if it is empty
        sync(self.copy.hidden)
        os.rename(self.copy.hidden, self.copy.data)
        sync(self.place)
        seconds = time.monotonic() - self.begin
        size = sum(entry.size for entry in missing)
        print(
            f"staged {self.url}: {len(objects)} files, {len(missing)} fetched, {size / 1e9:.3f} GB in "
            f"{seconds:.1f} s ({size / seconds / 1e6:.1f} MB/s), {len(gone)} removed: {self.copy.data}",
            flush=True,
        )

    # fetching

    def _fetch(self, missing: list[Object], checksums: dict[str, str]) -> None:
        self._total, self._all = len(missing), sum(entry.size for entry in missing)
        for entry in missing:  # where a folder was: empty, or with fetches that were begun
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
                self.store.stop()  # what is under way ends soon
                raise
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _one(self, entry: Object, sha256: str | None, journal) -> None:
        path = os.path.join(self.copy.hidden, entry.key)
        found = self.store.fetch(entry.key, path, entry.size, sha256, self._received)
        os.utime(path, ns=(time_of(entry),) * 2)
        with self._lock:
            journal.write(line(entry.key, entry.size, entry.etag, found, time_of(entry)))
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
                f"{self.url} has {len(missing)} more files, {self.place} takes {space.f_favail} more: set "
                f"{SCRATCH} to a folder on another disk"
            )

    def _checksums(self, objects: list[Object]) -> dict[str, str]:
        """key -> sha256, of the manifests that uploads leave beside what they have uploaded."""
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

    # of the node

    def _alive(self, text) -> None:
        """A sign of life, for the other processes and for who watches the log. text: or what makes it."""
        barrier.alive(f"staging {self.url}")
        now = time.monotonic()
        if now - self.said > _SAY_EVERY:
            self.said = now
            print(f"{text() if callable(text) else text} ({now - self.begin:.0f} s)", flush=True)

    @contextlib.contextmanager
    def _alone(self, name: str, why: str, seconds: float = float("inf")):
        """Hold a lock of this node that others may hold for long."""
        begin = time.monotonic()
        with self._open(name) as file:
            while True:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except (BlockingIOError, PermissionError):
                    pass
                if time.monotonic() - begin > seconds:
                    raise BadInput(
                        f"{self.url} has changed, and {why} for {seconds:.0f} s: wait until it has ended, or "
                        f"set {SCRATCH} to another folder"
                    )
                time.sleep(0.1)
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    self._alive(f"waiting for {self.url}: {why}")
                else:
                    barrier.alive(f"staging {self.url}")
            yield

    def _open(self, name: str):
        return open(os.path.join(self.place, f".{name}"), "a+")
