"""An engine with threads that decode, crop and resize images into a ring of batch buffers.

simplejpeg, OpenCV and torch release the GIL. So threads work in parallel, like DataLoader's processes, but
without copies between processes.
"""

import collections
import concurrent.futures
import threading
from collections.abc import Callable

import numpy as np
import torch

from datasets.folders import boxes, resize
from datasets.loaders.engines.reader import Reader
from datasets.loaders.loader import Images
from datasets.sampling.sampler import Batch, Plan
from datasets.stores.store import Store

_AHEAD = 3  # batches that are filled while one is used
_IMAGES_PER_TASK = 4  # spreads the cost of starting a task


class Threads:
    """An engine for Loader.

    store: of datasets/stores.
    workers: threads.
    pinned: use pinned memory, which a GPU can read directly.
    antialias: as in resize.fit().
    """

    reuses_memory = True

    def __init__(self, store: Store, workers: int, pinned: bool = False, antialias: bool = True):
        self.store, self.pinned, self.antialias = store, pinned, antialias
        self._pool, self._reader = _pool(workers), Reader(store)
        self._ring: list[torch.Tensor] = []
        self._own = threading.local()

    def run(self, plan: Plan) -> Images:
        waiting = collections.deque()  # (batch, its images, tasks), oldest first
        free: list[torch.Tensor] = []
        batches = iter(plan)
        try:
            while True:
                while len(waiting) <= _AHEAD and (batch := next(batches, None)):
                    if not waiting and not free:
                        free = self._memory(plan.largest, plan.size)
                    memory = free.pop()
                    images = memory[: len(batch.ids)]
                    waiting.append((batch, memory, images, self._submit(batch, images)))
                if not waiting:
                    return
                batch, memory, images, tasks = waiting[0]
                for task in tasks:
                    task.result()
                yield batch, images
                waiting.popleft()
                free.append(memory)
        finally:
            tasks = [task for entry in waiting for task in entry[-1]]
            for task in tasks:
                task.cancel()
            concurrent.futures.wait(tasks)  # no task may write into memory that is reused

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._reader.close()
        self._ring.clear()

    def _memory(self, count: int, size: int) -> list[torch.Tensor]:
        """Return the ring of buffers, which is kept from epoch to epoch."""
        shape = (count, size, size, 3)
        if not self._ring or self._ring[0].shape != shape:
            self._ring = [
                torch.empty(shape, dtype=torch.uint8, pin_memory=self.pinned) for _ in range(_AHEAD + 2)
            ]
        return list(self._ring)

    def _submit(self, batch: Batch, images: torch.Tensor) -> list[concurrent.futures.Future]:
        array, read = images.numpy(), self._reader.start(batch.ids)
        heights = self.store.index.heights[batch.ids]
        # Python's integers: each access to an array would cost a part of a microsecond with the lock
        rows = np.stack([batch.ids, heights, *batch.crops], axis=1, dtype=np.int64, casting="unsafe").tolist()
        parts = (
            range(first, min(first + _IMAGES_PER_TASK, len(array)))
            for first in range(0, len(array), _IMAGES_PER_TASK)
        )
        return [self._pool.submit(self._fill, rows, read, array, places) for places in parts]

    def _fill(self, rows: list[list[int]], read: Callable, images: np.ndarray, places: range) -> None:
        for place, content in zip(places, read(places), strict=True):
            id, planned, top, left, height, width, flip = rows[place]
            box = top, left, height, width
            if isinstance(content, np.ndarray):  # pixels of a pack or a cache
                pixels = boxes.cut_out(content, planned, box)
            else:
                pixels = self.store.crop(id, content, planned, box, self._scratch(id))
            resize.fit(pixels, flip, images[place], self.antialias)

    def _scratch(self, id: int) -> np.ndarray:
        """Return this thread's memory for a decoded image. New memory would cost page faults."""
        needed = 3 * int(self.store.index.widths[id]) * int(self.store.index.heights[id])
        scratch = getattr(self._own, "scratch", None)
        if scratch is None or len(scratch) < needed:
            scratch = self._own.scratch = np.empty(needed, np.uint8)
        return scratch


def _pool(workers: int) -> concurrent.futures.ThreadPoolExecutor:
    """Return a pool in whose threads torch starts no threads: for one image they cost more than they gain."""
    threads = torch.get_num_threads()
    begun = threading.Barrier(workers)

    def begin() -> None:
        torch.set_num_threads(1)
        begun.wait(60)

    pool = concurrent.futures.ThreadPoolExecutor(workers, "loader", initializer=begin)
    concurrent.futures.wait([pool.submit(int) for _ in range(workers)])
    torch.set_num_threads(threads)  # begin() also changed the default of later threads
    return pool
