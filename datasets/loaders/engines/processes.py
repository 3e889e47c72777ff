"""The usual way: torch's DataLoader with worker processes, Pillow and torchvision's transforms.

It differs from the usual in what it is told: ids with their boxes instead of ids, so that no worker draws
random numbers.
"""

import functools
import io
import multiprocessing
import os
import signal
import weakref
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import functional

from common.distributed import preemption
from common.exits import BadInput
from datasets.folders.cut import scaled
from datasets.loaders.loader import Images
from datasets.sampling.augment import Crop
from datasets.sampling.sampler import Batch, Plan
from datasets.stores.store import Store


class Processes:
    """An engine for Loader. workers: processes; 0 loads in the calling one."""

    reuses_memory = False

    def __init__(self, store: Store, workers: int, pinned: bool = False, antialias: bool = True):
        self.store, self.workers, self.pinned, self.antialias = store, workers, pinned, antialias
        self._loader: DataLoader | None = None
        self._plan: Plan | None = None
        self._closing = multiprocessing.Value("b", 0, lock=False)
        weakref.finalize(self, _close, self._closing)

    def run(self, plan: Plan) -> Images:
        if self._loader is None or plan is not self._plan:
            self._plan = plan
            self._loader = DataLoader(
                _Images(self.store, plan.size, self.antialias),
                batch_sampler=_Rows(plan),
                collate_fn=_collate,
                num_workers=self.workers,
                pin_memory=self.pinned,
                persistent_workers=self.workers > 0,
                worker_init_fn=functools.partial(_begin, self._closing),
                generator=torch.Generator(),  # its seed is not to be drawn from the job's random numbers
            )
        for rows, images in self._loader:
            if isinstance(images, BadInput):
                raise images
            ids, labels, top, left, height, width, flip = rows
            yield Batch(ids, labels, Crop(top, left, height, width, flip.astype(bool))), images

    def close(self) -> None:
        _close(self._closing)
        self._loader = self._plan = None  # its workers end with it


def _begin(closing: Any, worker: int) -> None:
    """In a worker: not to die of a platform's SIGTERM before the job has saved, but of its parent's at the
    end."""
    preemption.ignore()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if closing.value else None)


def _close(closing: Any) -> None:
    closing.value = 1


class _Rows:
    """Lists of (id, label, top, left, height, width, flip), a list a step."""

    def __init__(self, plan: Plan):
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self):
        for batch in self.plan:
            yield np.stack([batch.ids, batch.labels, *batch.crops], axis=1).tolist()


class _Images(Dataset):
    def __init__(self, store: Store, size: int, antialias: bool):
        self.store, self.size, self.antialias = store, size, antialias

    def __getitems__(self, rows: list[list[int]]) -> list[tuple[list[int], torch.Tensor | BadInput]]:
        """Return the items of a batch, or its error: raised, it would become the text of a traceback."""
        try:
            contents = self.store.read(np.array([row[0] for row in rows], dtype=np.int64))
            return [self._item(row, content) for row, content in zip(rows, contents, strict=True)]
        except BadInput as error:
            return [(row, error) for row in rows]

    def _item(self, row: list[int], content: bytes | np.ndarray) -> tuple[list[int], torch.Tensor]:
        id, _, top, left, height, width, flip = row
        image = self._open(id, content)
        scale = image.height / int(self.store.index.heights[id])
        box = scaled(top, left, height, width, scale, image.height, image.width)
        image = functional.resized_crop(image, *box, [self.size, self.size], antialias=self.antialias)
        image = functional.horizontal_flip(image) if flip else image
        return row, torch.from_numpy(np.array(image))

    def _open(self, id: int, content: Any) -> Image.Image:
        if self.store.form == "decoded":
            return Image.fromarray(self.store.decode(id, content))
        try:
            file = io.BytesIO(self.store.portable(id, content))
            return Image.open(file, formats=["JPEG", "PNG"]).convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises
            raise BadInput(f"cannot decode {self.store.index.path(id)}: {error}") from error


def _collate(samples: list) -> tuple[np.ndarray, torch.Tensor | BadInput]:
    rows, images = zip(*samples, strict=True)
    errors = [image for image in images if isinstance(image, BadInput)]
    return np.array(rows, dtype=np.int64).T, errors[0] if errors else torch.stack(images)
