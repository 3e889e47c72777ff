"""An engine with torch's DataLoader: worker processes, Pillow and torchvision's transforms.

The workers receive ids with their boxes, so they draw no random numbers.
"""

import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from common.ground.exits import BadInput
from datasets.folders.boxes import scaled
from datasets.loaders.engines.workers import Workers
from datasets.loaders.loader import Images
from datasets.sampling.augment import Crop
from datasets.sampling.sampler import Batch, Plan
from datasets.stores.forms import cannot_decode
from datasets.stores.store import Store


class Processes:
    """An engine for Loader. workers, pinned: as in Workers. antialias: as in torchvision's resized_crop."""

    reuses_memory = False

    def __init__(self, store: Store, workers: int, pinned: bool = False, antialias: bool = True):
        # not with the module: torchvision takes longer to import than torch. Here, before the workers fork
        import torchvision.transforms.v2  # noqa: F401

        self.store, self.antialias = store, antialias
        self._workers = Workers(workers, pinned)
        self._rows: _Rows | None = None

    def run(self, plan: Plan) -> Images:
        if self._rows is None or plan is not self._rows.plan:
            self._rows = _Rows(plan)
        images_of = _Images(self.store, self.antialias)
        for rows, images in self._workers.load(images_of, self._rows, _collate):
            if isinstance(images, BadInput):
                raise images
            ids, labels, top, left, height, width, flip, _ = rows
            yield Batch(ids, labels, Crop(top, left, height, width, flip.astype(bool))), images

    def close(self) -> None:
        self._workers.close()


class _Rows:
    """An iterable of lists of (id, label, top, left, height, width, flip, size), one list per step."""

    def __init__(self, plan: Plan):
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self):
        for batch in self.plan:
            size = np.full(len(batch.ids), self.plan.size)
            yield np.stack([batch.ids, batch.labels, *batch.crops, size], axis=1).tolist()


class _Images(Dataset):
    def __init__(self, store: Store, antialias: bool):
        self.store, self.antialias = store, antialias

    def __getitems__(self, rows: list[list[int]]) -> list[tuple[list[int], torch.Tensor | BadInput]]:
        """Return the items of a batch, or its error. A raised error would become the text of a traceback."""
        try:
            contents = self.store.read(np.array([row[0] for row in rows], dtype=np.int64))
            return [self._item(row, content) for row, content in zip(rows, contents, strict=True)]
        except BadInput as error:
            return [(row, error) for row in rows]

    def _item(self, row: list[int], content: bytes | np.ndarray) -> tuple[list[int], torch.Tensor]:
        from torchvision.transforms.v2 import functional

        id, _, top, left, height, width, flip, size = row
        image = self._open(id, content)
        scale = image.height / int(self.store.index.heights[id])
        box = scaled(top, left, height, width, scale, image.height, image.width)
        image = functional.resized_crop(image, *box, [size, size], antialias=self.antialias)
        image = functional.horizontal_flip(image) if flip else image
        return row, torch.from_numpy(np.array(image))

    def _open(self, id: int, content: Any) -> Image.Image:
        if self.store.form == "decoded":
            return Image.fromarray(self.store.decode(id, content))
        try:
            file = io.BytesIO(self.store.portable(id, content))
            return Image.open(file, formats=["JPEG", "PNG"]).convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:  # Pillow's exceptions
            raise cannot_decode(self.store.index, id, error) from error


def _collate(samples: list) -> tuple[np.ndarray, torch.Tensor | BadInput]:
    rows, images = zip(*samples, strict=True)
    errors = [image for image in images if isinstance(image, BadInput)]
    return np.array(rows, dtype=np.int64).T, errors[0] if errors else torch.stack(images)
