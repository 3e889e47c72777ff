"""An engine with threads that decode, crop and resize images into a ring of batch buffers.

simplejpeg, OpenCV and torch release the GIL. So threads work in parallel, like DataLoader's processes, but
without copies between processes.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import threading

import numpy as np
import torch

from datasets.loaders.engines.crops import Crops, Row
from datasets.loaders.engines.reader import Reader
from datasets.loaders.loader import Images
from datasets.sampling.sampler import Batch, Plan
from datasets.stores.ahead import work_ahead
from datasets.stores.store import Store

_AHEAD = 3  # batches that are filled while one is used
_IMAGES_PER_TASK = 4


class Threads:
    """An engine for Loader.

    store: of datasets/stores.
    workers: threads.
    pinned: use pinned memory, which a GPU can read directly.
    antialias: as in resize.fit().
    """

    reuses_memory = True

    def __init__(self, store: Store, workers: int, pinned: bool = False, antialias: bool | str = True):
        self.store, self.pinned = store, pinned
        self._crops = Crops(store, antialias)
        self._reader = Reader(store, _pool(workers), _IMAGES_PER_TASK)
        self._ring: list[torch.Tensor] = []
        self._own = threading.local()

    def run(self, plan: Plan) -> Images:
        ring = itertools.cycle(self._memory(plan.largest, plan.size))
        batches = ((batch, memory[: len(batch.ids)]) for batch, memory in zip(plan, ring, strict=False))
        with contextlib.closing(work_ahead(batches, self._submit, _AHEAD)) as filled:
            for (batch, images), _ in filled:
                yield batch, images

    def close(self) -> None:
        self._reader.close()
        self._ring.clear()

    def _memory(self, count: int, size: int) -> list[torch.Tensor]:
        """Return the ring of buffers, which is kept from epoch to epoch."""
        shape = (count, size, size, 3)
        if not self._ring or self._ring[0].shape != shape:
            self._ring = [
                torch.empty(shape, dtype=torch.uint8, pin_memory=self.pinned) for _ in range(_AHEAD + 1)
            ]
        return self._ring

    def _submit(self, filled: tuple[Batch, torch.Tensor]) -> list[concurrent.futures.Future]:
        batch, images = filled
        return self._reader.start(
            batch.ids, functools.partial(self._fill, self._crops.rows(batch), images.numpy())
        )

    def _fill(self, rows: list[Row], images: np.ndarray, places: range, contents: list) -> None:
        for place, content in zip(places, contents, strict=True):
            self._crops.crop(rows[place], content, images[place], self._scratch(rows[place][0]))

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
