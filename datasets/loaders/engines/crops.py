"""Decode, crop and resize the images of a batch, in threads or in worker processes.

A batch has the boxes of its crops, so nothing here draws random numbers.
"""

import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from bootfile.sampling.plan import Batch, Plan
from datasets.folders.resize import BICUBIC, BILINEAR, fit
from datasets.stores.forms import cannot_decode
from datasets.stores.store import Store, scaled

Row = list[int]  # id, rows of the image for which the box was planned, top, left, height, width, flip


class Crops:
    """The function of workers: it returns the images of a batch, uint8 [n, size, size, 3].

    interpolation: as in resize.fit().
    """

    def __init__(self, store: Store, interpolation: str = BILINEAR):
        self.store = store
        self.interpolation = interpolation

    def batch_bytes(self, plan: Plan) -> int:
        """Return the bytes of the largest batch of a plan, at the image size of this epoch.

        Workers calls it in the training process before it starts its workers, to check the room in /dev/shm.
        """
        return plan.largest * plan.size**2 * 3

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return the images of a batch. A worker process calls it for each of its batches."""
        images = torch.empty((len(batch.ids), batch.size, batch.size, 3), dtype=torch.uint8)
        # one request for the whole batch: a store in a network answers them together
        contents = self.store.read(batch.ids)
        for row, content, image in zip(self.rows(batch), contents, images.numpy(), strict=True):
            self.crop(row, content, image)
        return images

    def rows(self, batch: Batch) -> list[Row]:
        """Return a row for each image of a batch. It is called once a batch, before its images are cut."""
        heights = self.store.index.heights[batch.ids]
        # Python's integers: each access to an array would cost a part of a microsecond with the lock
        return np.stack([batch.ids, heights, *batch.crops], axis=1, dtype=np.int64, casting="unsafe").tolist()

    def crop(self, row: Row, content: Any, image: np.ndarray) -> None:
        """Write the crop of a sample into `image`, uint8 [size, size, 3]. content: as for Store.decode().

        A worker process calls it for each sample; threads call cut() and fit() for several samples."""
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
        """Write the crop of a sample into `image`, as the class above does. A worker process calls it."""
        from torchvision.transforms.v2 import InterpolationMode, functional

        id, planned, top, left, height, width, flip = row
        whole = self._open(id, content)
        box = scaled(top, left, height, width, whole.height / planned, whole.height, whole.width)
        mode = InterpolationMode(BICUBIC if self.interpolation == BICUBIC else BILINEAR)
        size = list(image.shape[:2])
        result = functional.resized_crop(whole, *box, size, mode, antialias=True)
        if flip:
            result = functional.horizontal_flip(result)
        image[:] = np.asarray(result)

    def _open(self, id: int, content: Any) -> Image.Image:
        """Return the whole image of a sample, RGB. crop() calls it, in a worker. Raises BadInput."""
        if self.store.form == "decoded":
            return Image.fromarray(self.store.decode(id, content))
        try:
            file = io.BytesIO(self.store.portable(id, content))
            return Image.open(file, formats=["JPEG", "PNG"]).convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:  # Pillow's exceptions
            raise cannot_decode(self.store.index, id, error) from error
