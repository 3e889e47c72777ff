"""Crops of Pillow and torchvision's transforms, for the worker processes of torch's DataLoader.

The workers receive ids with their boxes, so they draw no random numbers.
"""

import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from datasets.folders.resize import BICUBIC
from datasets.sampling.sampler import Batch, Plan
from datasets.stores.forms import cannot_decode
from datasets.stores.store import Store, scaled


class Crops:
    """The function of the workers: it returns the images of a batch, uint8 [n, size, size, 3].

    antialias: as in torchvision's resized_crop.
    """

    def __init__(self, store: Store, antialias: bool | str = True):
        # not with the module: torchvision takes longer to import than torch. Here, before the workers fork
        import torchvision.transforms.v2  # noqa: F401

        self.store, self.antialias = store, antialias

    def batch_bytes(self, plan: Plan) -> int:
        """Return the bytes of the largest batch of a plan, at the image size of this epoch."""
        return plan.largest * plan.size**2 * 3

    def __call__(self, batch: Batch, size: int) -> torch.Tensor:
        rows = np.stack([batch.ids, *batch.crops], axis=1).tolist()
        contents = self.store.read(batch.ids)
        return torch.stack(
            [self._crop(size, content, *row) for row, content in zip(rows, contents, strict=True)]
        )

    def _crop(
        self, size: int, content: Any, id: int, top: int, left: int, height: int, width: int, flip: int
    ) -> torch.Tensor:
        from torchvision.transforms.v2 import InterpolationMode, functional

        image = self._open(id, content)
        scale = image.height / int(self.store.index.heights[id])
        box = scaled(top, left, height, width, scale, image.height, image.width)
        mode = InterpolationMode(BICUBIC if self.antialias == BICUBIC else "bilinear")
        image = functional.resized_crop(image, *box, [size, size], mode, antialias=bool(self.antialias))
        return torch.from_numpy(np.array(functional.horizontal_flip(image) if flip else image))

    def _open(self, id: int, content: Any) -> Image.Image:
        if self.store.form == "decoded":
            return Image.fromarray(self.store.decode(id, content))
        try:
            file = io.BytesIO(self.store.portable(id, content))
            return Image.open(file, formats=["JPEG", "PNG"]).convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:  # Pillow's exceptions
            raise cannot_decode(self.store.index, id, error) from error
