"""Make a folder of this node and the objects below a URL equal: compare, transfer in threads, report.

    missing, unchanged = compare(store, wanted, is_equal)
    fetch(store, folder, missing, progress)         or send(store, folder, missing, progress)

Each of its users says its policy: which files it wants, when a copy equals its original, what happens to the
other files of both sides, and how it shows the progress.

    datasets/staging.py           a copy on the scratch disk, complete for all jobs of the node
    launch/transfer/upload.py     a folder that a manifest describes
    launch/transfer/fetch.py      results, into a folder of the user

A job that uploads its results while it runs (common/checkpoint/mirror.py) does not use it: each file is
copied before it is sent, under a lease, and in an order that the list at the URL follows.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from common.object_store.store import Object, ObjectStore

T = TypeVar("T")
_EVERY = 1.0  # seconds between two reports of the progress


class Progress:
    """The bytes that a transfer has moved. A subclass shows them."""

    def __init__(self) -> None:
        self.count = 0  # bytes
        self._begin = time.monotonic()
        self._lock = threading.Lock()  # of count, to which several threads add

    @property
    def seconds(self) -> float:
        """The time since the transfer began."""
        return time.monotonic() - self._begin

    def add(self, count: int) -> None:
        """Add new bytes, a negative number if they must be moved again. The threads that transfer call it."""
        with self._lock:
            self.count += count

    def report(self) -> None:
        """Show the progress. The thread that waits for the transfer calls it about once a second and after
        each file."""


def list_files(folder: str) -> Iterator[os.DirEntry]:
    """Yield all entries at any depth below a folder that are not folders. Raises OSError. A link to a folder
    is such an entry: it is not followed."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from list_files(entry.path)
        else:
            yield entry


def compare(
    store: ObjectStore, wanted: Iterable[Object], is_equal: Callable[[Object], bool]
) -> tuple[list[Object], list[Object]]:
    """Return (the wanted objects that must be transferred, those that are equal on both sides).

    is_equal: called with each wanted object, in the threads of the store: it may send a request.
    """
    wanted = _largest_first(wanted)
    is_unchanged = run(store, (partial(is_equal, entry) for entry in wanted))
    missing = [entry for entry, answer in zip(wanted, is_unchanged, strict=True) if not answer]
    return missing, [entry for entry, answer in zip(wanted, is_unchanged, strict=True) if answer]


def fetch(
    store: ObjectStore,
    folder: str,
    objects: Iterable[Object],
    progress: Progress,
    after: Callable[[Object, bool], object] = lambda entry, has_digest: None,
) -> None:
    """Download objects to the files of their keys below a folder. Every file appears at once and whole. The
    bytes are compared with the sha256 of the Object if it has one, else with the digest that the store keeps.

    after: called with the Object of a file that has arrived and whether there was a digest, in the thread
        that fetched it.
    Raises StoreError and OSError, and the exceptions of `after`. The first failure ends the transfer.
    """

    def fetch_one(entry: Object) -> None:
        path = os.path.join(folder, entry.key)
        after(entry, store.fetch(entry.key, path, entry.size, progress.add, entry.sha256))

    objects = list(objects)
    for parent in {os.path.dirname(entry.key) for entry in objects}:
        os.makedirs(os.path.join(folder, parent), exist_ok=True)
    run(store, (partial(fetch_one, entry) for entry in _largest_first(objects)), progress.report)


def send(store: ObjectStore, folder: str, objects: Iterable[Object], progress: Progress) -> None:
    """Upload the files below a folder that become these objects. A file with another sha256 is refused.
    Raises StoreError and BadInput. The first failure ends the transfer."""

    def send_one(entry: Object) -> None:
        store.send(os.path.join(folder, entry.key), entry.key, progress.add, entry.sha256)

    run(store, (partial(send_one, entry) for entry in _largest_first(objects)), progress.report)


def run(
    store: ObjectStore, tasks: Iterable[Callable[[], T]], report: Callable[[], object] = lambda: None
) -> list[T]:
    """Run the tasks in the threads of a store, and return [task() for task in tasks].

    If a task or report() raises an exception, or on Ctrl-C, the requests of all threads end, the store is
    stopped, and that exception is raised. report: called about once a second, and after each task.
    """
    results: dict[int, T] = {}
    running: dict[Future[T], int] = {}  # a task under way -> its number
    waiting = enumerate(tasks)
    pool = ThreadPoolExecutor(store.threads, "transfer")
    try:
        while True:
            # A few more than there are threads: a data set may have a million files.
            for number, task in itertools.islice(waiting, 4 * store.threads - len(running)):
                running[pool.submit(task)] = number
            if not running:
                return [results[number] for number in sorted(results)]
            for ended in wait(running, _EVERY, FIRST_COMPLETED).done:
                results[running.pop(ended)] = ended.result()
            report()
    # also after Ctrl-C: otherwise the other threads would first end their files
    except BaseException:
        store.stop()
        raise
    finally:
        # The other threads have noticed stop(), or there are none.
        pool.shutdown(wait=True, cancel_futures=True)


def _largest_first(objects: Iterable[Object]) -> list[Object]:
    """Return objects in the order of a transfer: a large one at the end would keep all other threads idle."""
    return sorted(objects, key=lambda entry: entry.size, reverse=True)
