"""The interface of a store of samples, the store of the image files, and the threads that read a store some
steps ahead, with the results in order."""

import collections
import concurrent.futures
import functools
import itertools
import os
import zlib
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

import numpy as np

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, read_again
from bootfile.loaders.reading import reading
from datasets.folders import images, tar_files
from datasets.stores import forms

_Item = TypeVar("_Item")
Box = tuple[int, int, int, int]  # top, left, height, width of the part that a crop needs; pixels


class Store:
    """The samples of a data set, by id. Threads may share it; it can be pickled and survives a fork. index:
    an ImageFolderIndex. form: of the samples that read() returns, see forms.py. is_remote: reading waits for
    a network, so engines request a whole batch in advance."""

    index: Any
    form = "encoded"
    is_remote = False

    def read(self, ids: np.ndarray) -> list[bytes | np.ndarray]:
        """Return the samples: bytes of a file or a JPEG, or read-only pixels uint8 [height, width, 3]. Pixels
        may be fewer than in the index. ids: int64 [n]. Raises BadInput if a sample cannot be read."""
        raise NotImplementedError

    def decode(self, id: int, content: bytes | np.ndarray, scratch: np.ndarray | None = None) -> np.ndarray:
        """Return the pixels of a sample, uint8 [height, width, 3]. content: as returned by read(). scratch:
        uint8 memory, which the result may use. Raises BadInput if the content cannot be decoded."""
        if isinstance(content, np.ndarray):
            return content
        try:
            return images.decode(content, self._is_plain(id), scratch)
        except images.BadImage as error:
            raise forms.cannot_decode(self.index, id, error) from error

    def decode_box(
        self, id: int, content: Any, planned: int, box: Box, scratch: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the pixels of the box of a sample, uint8 [height, width, 3], perhaps a view of the scratch
        memory. If the image is smaller than the one for which the box was planned, so is the box.

        planned: rows of that image. content, scratch: as for decode(). Raises BadInput if the content cannot
        be decoded.
        """
        image = self.decode(id, content, scratch)
        top, left, height, width = fitted(box, planned, *image.shape[:2])
        return image[top : top + height, left : left + width]

    def portable(self, id: int, content: bytes) -> bytes:
        """Return encoded bytes for another decoder (Pillow, DALI), as a plain PNG if the image is not plain.
        Raises BadInput if it cannot be decoded."""
        if self._is_plain(id):
            return content
        try:
            return images.normalised(content)
        except images.BadImage as error:
            raise forms.cannot_decode(self.index, id, error) from error

    def image(self, id: int) -> np.ndarray:
        """Read and decode one sample."""
        return self.decode(id, self.read(np.array([id]))[0])

    def close(self) -> None:
        """Release the resources of the store."""

    def _is_plain(self, id: int) -> bool:
        """Return whether each decoder makes the same pixels of the stored bytes."""
        return self.form in forms.JPEGS or bool(self.index.plain[id])


def fitted(box: Box, planned: int, rows: int, columns: int) -> Box:
    """Return the box in an image of `rows` rows and `columns` columns: packs and caches keep smaller images.
    planned: rows of the image for which the box was planned."""
    return box if rows == planned else scaled(*box, rows / planned, rows, columns)


def scaled(top: int, left: int, height: int, width: int, scale: float, rows: int, columns: int) -> Box:
    """Return the box in the scaled image, which has `rows` rows and `columns` columns."""
    top = min(round(top * scale), rows - 1)
    left = min(round(left * scale), columns - 1)
    height = max(round(height * scale), 1)
    width = max(round(width * scale), 1)
    return top, left, min(height, rows - top), min(width, columns - left)


class FileStore(Store):
    """The files of a folder, or of its tar files. A start compares only a part of a large data set with its
    index, so each read compares size and times, and if only a time differs, the CRC-32. verified: compare
    the CRC-32 in any case. This is needed for copies that are stored under the index's fingerprint."""

    def __init__(self, index: Any, verified: bool = False):
        self.index = index
        self.verified = verified

    def read(self, ids: np.ndarray) -> list[bytes | np.ndarray]:
        """Return the bytes of files, one after the other: engines call it in several threads or processes."""
        return [self.content(id) for id in np.asarray(ids).tolist()]

    def content(self, id: int) -> bytes:
        """Return the bytes of a file. Raises BadInput, also if the file was changed since it was scanned."""
        index = self.index
        path = index.path(id)
        with reading(path), explained(f"cannot read {path}"):
            content, times = read_again(functools.partial(self._read, path, id), path)
        # of a member of a tar file only the size is compared
        has_other_time = times not in (None, (index.mtimes[id], index.ctimes[id]))
        reason = ""
        size = index.bytes[id]
        if len(content) != size:
            reason = f"has {len(content)} bytes, but had {size} when it was scanned"
        elif (self.verified or has_other_time) and not is_scanned(index, id, content):
            reason = "was changed since it was scanned"
        if reason:  # the next start scans again
            index.report_change()
            raise BadInput(f"{path} {reason}")
        return content

    def _read(self, path: str, id: int) -> tuple[bytes, tuple[int, int] | None]:
        """Return the bytes of a file, and its mtime and ctime (ns); None for a member of a tar file, whose
        times are those of the whole file. Raises OSError."""
        if member := tar_files.split_path(path):
            return tar_files.read_member(*member, int(self.index.bytes[id])), None
        with open(path, "rb", buffering=0) as file:
            content = file.read()
            status = os.fstat(file.fileno())
        return content, (status.st_mtime_ns, status.st_ctime_ns)


class PairFiles(FileStore):
    """The files of a paired_images.PairIndex, decoded to the number of rows that the index asks for."""

    def decode(self, id: int, content: bytes | np.ndarray, scratch: np.ndarray | None = None) -> np.ndarray:
        """Return the pixels of a sample."""
        image = super().decode(id, content, scratch)
        shape = int(self.index.heights[id]), int(self.index.widths[id])
        if image.shape[:2] == shape:
            return image
        from datasets.folders.resize import resized  # imports torch, which takes a second

        return resized(image, *shape)


def is_scanned(index: Any, id: int, content: bytes) -> bool:
    """Return whether the content is the one that was scanned for the index."""
    return zlib.crc32(content) == index.crc32[id]


def work_ahead(
    items: Iterable[_Item], begin: Callable[[_Item], list[concurrent.futures.Future]], count: int
) -> Generator[tuple[_Item, list[Any]], None, None]:
    """Yield (item, results of its tasks) in order. The next `count` items have begun before one is yielded.
    begin: called with an item in this thread; returns its tasks. No task runs after the generator is closed.
    The engines use it for the batches of an epoch, and packs for the samples that they write."""
    remaining = iter(items)
    begun: collections.deque[tuple[_Item, list[concurrent.futures.Future]]] = collections.deque()
    try:
        while True:
            for item in itertools.islice(remaining, count + 1 - len(begun)):
                begun.append((item, begin(item)))
            if not begun:
                return
            # it stays in `begun` until its tasks have ended: if one fails, the others are waited for below
            item, tasks = begun[0]
            results = [task.result() for task in tasks]
            begun.popleft()
            yield item, results
    finally:  # the caller has left, or a task has failed: its memory and files are free only without tasks
        unfinished = list(itertools.chain(*(tasks for _, tasks in begun)))
        for task in unfinished:
            task.cancel()
        concurrent.futures.wait(unfinished)


class Reader:
    """A reader of a store for an engine. pool: of threads, which close() ends. per_task: samples of a task,
    to spread the cost of starting it."""

    def __init__(self, store: Store, pool: concurrent.futures.ThreadPoolExecutor, per_task: int):
        self._store = store
        self._pool = pool
        self.per_task = per_task
        # threads that wait for a remote store: while one batch is received, the next is requested
        self._fetchers = concurrent.futures.ThreadPoolExecutor(2, "fetcher") if store.is_remote else None

    def start(
        self, ids: np.ndarray, work: Callable[[range, list[bytes | np.ndarray]], Any]
    ) -> list[concurrent.futures.Future]:
        """Start the tasks of a batch. Each returns work(places, samples) for a range of positions in `ids`.

        samples: as returned by Store.read(). If the store is remote, reading of all ids starts now, otherwise
        with each task. An engine calls it in the thread of the training, some batches ahead; work() runs in
        the threads of the pool.
        """
        # one request for the batch: each request over a network takes time
        fetched = self._fetchers.submit(self._store.read, ids) if self._fetchers else None

        def run(places: range) -> Any:
            """Do one task, in a thread of the pool. It waits for the samples if they are on their way."""
            if fetched:
                return work(places, fetched.result()[places.start : places.stop])
            return work(places, self._store.read(ids[places.start : places.stop]))

        places = range(len(ids))
        firsts = range(0, len(ids), self.per_task)
        return [self._pool.submit(run, places[first : first + self.per_task]) for first in firsts]

    def close(self) -> None:
        """End the threads; tasks that have not begun are dropped."""
        for pool in (self._pool, self._fetchers):
            if pool:
                pool.shutdown(cancel_futures=True)
