"""Decode, crop and resize the images of a batch, in threads or in worker processes.

A batch has the boxes of its crops, so nothing here draws random numbers. simplejpeg, OpenCV and torch release
the GIL, so the threads of an engine work in parallel, like DataLoader's processes, but without copies between
processes.
"""

import concurrent.futures
import contextlib
import copy
import functools
import io
import itertools
import threading
from typing import Any

import numpy as np
import torch
from PIL import Image

from bootfile.loaders.loader import Data, Engine
from bootfile.sampling.plan import Batch, Plan
from datasets.folders.image_folder import ImageFolderIndex
from datasets.folders.resize import BICUBIC, BILINEAR, fit
from datasets.loaders.threads import start_pool
from datasets.stores.files import FileStore, Reader, Store, scaled, work_ahead
from datasets.stores.forms import cannot_decode

_AHEAD = 3  # batches that are filled while one is used
# images of a task: fewer tasks cost less, but each thread gets one of every batch
_LEAST = 4
_MOST = 8
_DECODED = 2**23  # bytes of the images that a thread decodes before it resizes them; at least one image
Row = list[int]  # id, rows of the image for which the box was planned, top, left, height, width, flip


class Crops:
    """The function of workers: it returns the images of a batch, uint8 [n, size, size, 3]. interpolation: as
    in resize.fit()."""

    def __init__(self, store: Store, interpolation: str = BILINEAR):
        self.store = store
        self.interpolation = interpolation

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return the images of a batch."""
        images = torch.empty((len(batch.ids), batch.size, batch.size, 3), dtype=torch.uint8)
        # one request for the whole batch: a store in a network answers them together
        contents = self.store.read(batch.ids)
        for row, content, image in zip(self.rows(batch), contents, images.numpy(), strict=True):
            self.crop(row, content, image)
        return images

    def rows(self, batch: Batch) -> list[Row]:
        """Return a row for each image of a batch."""
        heights = self.store.index.heights[batch.ids]
        # Python's integers: each access to an array would cost a part of a microsecond with the lock
        return np.stack([batch.ids, heights, *batch.crops], axis=1, dtype=np.int64, casting="unsafe").tolist()

    def crop(self, row: Row, content: Any, image: np.ndarray) -> None:
        """Write the crop of a sample into `image`, uint8 [size, size, 3]. content: as for Store.decode()."""
        self.fit([(self.cut(row, content), row[-1], image)])

    def cut(self, row: Row, content: Any, scratch: np.ndarray | None = None) -> np.ndarray:
        """Return the pixels of the box of a sample, uint8 [height, width, 3], perhaps a view of the scratch
        memory. content, scratch: as for Store.decode(). If the image is smaller than the one for which the
        box was planned, so is the box. Raises BadInput."""
        id, planned, top, left, height, width, _ = row
        return self.store.decode_box(id, content, planned, (top, left, height, width), scratch)

    def fit(self, cut: list[tuple[np.ndarray, int, np.ndarray]]) -> None:
        """Resize boxes into images, and remove them from the list: (pixels of cut(), flip, image)."""
        while cut:
            fit(*cut.pop(), self.interpolation)


class TorchvisionCrops(Crops):
    """Crops with the pixels of Pillow and of torchvision's transforms."""

    def __init__(self, store: Store, interpolation: str = BILINEAR):
        # not with the module: torchvision takes longer to import than torch. Here, before the workers fork
        import torchvision.transforms.v2  # noqa: F401

        super().__init__(store, interpolation)

    def crop(self, row: Row, content: Any, image: np.ndarray) -> None:
        """Write the crop of a sample into `image`, as the class above does."""
        from torchvision.transforms.v2 import InterpolationMode, functional

        id, planned, top, left, height, width, flip = row
        if self.store.form == "decoded":
            whole = Image.fromarray(self.store.decode(id, content))
        else:
            try:
                file = io.BytesIO(self.store.portable(id, content))
                whole = Image.open(file, formats=["JPEG", "PNG"]).convert("RGB")
            except (OSError, SyntaxError, ValueError) as error:  # Pillow's exceptions
                raise cannot_decode(self.store.index, id, error) from error
        box = scaled(top, left, height, width, whole.height / planned, whole.height, whole.width)
        mode = InterpolationMode(BICUBIC if self.interpolation == BICUBIC else BILINEAR)
        size = list(image.shape[:2])
        result = functional.resized_crop(whole, *box, size, mode, antialias=True)
        if flip:
            result = functional.horizontal_flip(result)
        image[:] = np.asarray(result)


class Threads(Engine):
    """An engine for Loader. store: of datasets/stores. workers: threads. pinned: use pinned memory, which a
    GPU can read directly. interpolation: as in resize.fit()."""

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
        """End the threads and free the buffers."""
        self._reader.close()
        self._ring.clear()

    def _memory(self, count: int, size: int) -> list[torch.Tensor]:
        """Return the ring of buffers, which is kept from epoch to epoch. run() calls it at the start of each
        epoch; the buffers are new if the image size has changed."""
        shape = (count, size, size, 3)
        if not self._ring or self._ring[0].shape != shape:
            empty = functools.partial(torch.empty, shape, dtype=torch.uint8, pin_memory=self.pinned)
            self._ring = [empty() for _ in range(_AHEAD + 1)]
        return self._ring

    def _submit(self, to_fill: tuple[Batch, torch.Tensor]) -> list[concurrent.futures.Future]:
        """Start the tasks that fill the buffer of a batch."""
        batch, images = to_fill
        fill = functools.partial(self._fill, self._crops.rows(batch), images.numpy())
        return self._reader.start(batch.ids, fill)

    def _fill(self, rows: list[Row], images: np.ndarray, places: range, contents: list) -> None:
        """Write the crops of a task into `images`: decode its images, then resize them. In turns, the two
        push each other's code out of the processor's caches, which costs a tenth of the time."""
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


class RemoteCrops(Crops):
    """Crops for workers that must be able to read the files, and that get the index with the function."""

    def __init__(self, store: Any, interpolation: str = BILINEAR):
        if type(store) is FileStore and type(store.index) is ImageFolderIndex:
            store = copy.copy(store)
            store.index = _Columns(store.index)
        super().__init__(store, interpolation)

    def __call__(self, batch: Batch) -> Any:
        """Return the images of a batch."""
        return super().__call__(batch).numpy()  # Ray shares the memory of arrays, not of tensors


class _Columns(ImageFolderIndex):
    """An index that is pickled with its arrays, so the workers do not need its folder."""

    def __init__(self, index: ImageFolderIndex):
        for name, value in vars(index).items():
            setattr(self, name, np.array(value) if isinstance(value, np.ndarray) else value)

    def __reduce__(self) -> tuple:
        return object.__new__, (_Columns,), vars(self)
