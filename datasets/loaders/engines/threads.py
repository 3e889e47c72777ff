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

from bootfile.loaders.loader import Data, Engine
from bootfile.sampling.plan import Batch, Plan
from datasets.folders.resize import BILINEAR
from datasets.loaders.engines.crops import Crops, Row
from datasets.loaders.engines.reader import Reader
from datasets.loaders.image_loader import start_pool
from datasets.stores.ahead import work_ahead
from datasets.stores.store import Store

_AHEAD = 3  # batches that are filled while one is used
# images of a task: fewer tasks cost less, but each thread gets one of every batch
_LEAST = 4
_MOST = 8
_DECODED = 2**23  # bytes of the images that a thread decodes before it resizes them; at least one image


class Threads(Engine):
    """An engine for Loader.

    store: of datasets/stores.
    workers: threads.
    pinned: use pinned memory, which a GPU can read directly.
    interpolation: as in resize.fit().
    """

    reuses_memory = True

    def __init__(self, store: Store, workers: int, pinned: bool = False, interpolation: str = BILINEAR):
        self.store = store
        self.workers = workers
        self.pinned = pinned
        self._crops = Crops(store, interpolation)
        self._reader = Reader(store, start_pool(workers, "loader"), _LEAST)
        self._ring: list[torch.Tensor] = []  # buffers of batches, filled in turns
        self._of_thread = threading.local()  # scratch: memory of a thread, see _scratch()

    def run(self, plan: Plan) -> Data:
        """Yield the batches of an epoch with their images. When the caller asks for the next one, the buffer
        of the last is free to be filled again."""
        # in each epoch: the batches of another size are divided in another way
        self._reader.per_task = max(_LEAST, min(_MOST, plan.largest // self.workers))
        ring = itertools.cycle(self._memory(plan.largest, plan.size))
        # the last batch of an epoch may be smaller than its buffer
        batches = ((batch, memory[: len(batch.ids)]) for batch, memory in zip(plan, ring, strict=False))
        with contextlib.closing(work_ahead(batches, self._submit, _AHEAD)) as filled:
            # this thread waits for the oldest batch; the pool fills the next ones meanwhile
            for (batch, images), _ in filled:
                yield batch, images

    def close(self) -> None:
        """End the threads and free the buffers. The loader calls it at the end of the job."""
        self._reader.close()
        self._ring.clear()

    def _memory(self, count: int, size: int) -> list[torch.Tensor]:
        """Return the ring of buffers, which is kept from epoch to epoch. run() calls it at the start of each
        epoch; the buffers are new if the image size has changed."""
        shape = (count, size, size, 3)
        if not self._ring or self._ring[0].shape != shape:
            self._ring = [
                torch.empty(shape, dtype=torch.uint8, pin_memory=self.pinned) for _ in range(_AHEAD + 1)
            ]
        return self._ring

    def _submit(self, to_fill: tuple[Batch, torch.Tensor]) -> list[concurrent.futures.Future]:
        """Start the tasks that fill the buffer of a batch. work_ahead() calls it in the thread of the
        training, up to _AHEAD batches before the batch is used."""
        batch, images = to_fill
        fill = functools.partial(self._fill, self._crops.rows(batch), images.numpy())
        return self._reader.start(batch.ids, fill)

    def _fill(self, rows: list[Row], images: np.ndarray, places: range, contents: list) -> None:
        """Write the crops of a task into `images`: decode its images, then resize them. In turns, the two
        push each other's code out of the processor's caches, which costs a tenth of the time.

        A thread of the pool calls it once for each task."""
        index = self.store.index
        cut: list[tuple[np.ndarray, int, np.ndarray]] = []  # decoded, and not resized yet
        used = 0  # bytes of the scratch memory
        rows_of_task = [rows[place] for place in places]
        sizes = [3 * int(index.widths[id]) * int(index.heights[id]) for id, *_ in rows_of_task]
        # room for some images, and for the largest one in any case
        scratch = self._scratch(max(*sizes, min(sum(sizes), _DECODED)))
        for row, place, content, size in zip(rows_of_task, places, contents, sizes, strict=True):
            if used + size > len(scratch):  # full: resize what it holds, and use it again
                self._crops.fit(cut)
                used = 0
            pixels = self._crops.cut(row, content, scratch[used : used + size])
            cut.append((pixels, row[-1], images[place]))
            used += size
        self._crops.fit(cut)

    def _scratch(self, needed: int) -> np.ndarray:
        """Return this thread's memory for decoded images, of at least `needed` bytes. _fill() calls it for
        each task; new memory would cost page faults each time."""
        scratch = getattr(self._of_thread, "scratch", None)
        if scratch is None or len(scratch) < needed:
            scratch = np.empty(needed, np.uint8)
            self._of_thread.scratch = scratch
        return scratch
