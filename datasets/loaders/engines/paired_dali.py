"""An engine for pairs of images with NVIDIA DALI, which decodes, resizes, crops and flips by the plan."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from common.ground.exits import BadInput
from datasets.loaders.engines.dali import NVJPEG, Dali, load_dali
from datasets.loaders.loader import Images
from datasets.sampling.sampler import Batch, Plan
from datasets.stores.files import PairFiles


class PairedDali(Dali):
    """An engine for pairs. Raises BadInput if DALI or the GPU is missing.

    store: of a paired_images.PairIndex.
    workers: threads.
    device: of the batches.
    where: "cpu"; "gpu": nvJPEG decodes ("mixed") and the images stay on `device`; None: "gpu" if `device` is
        a GPU.
    """

    def __init__(self, store: PairFiles, workers: int, device: torch.device, where: str | None = None):
        where = where or ("gpu" if device.type == "cuda" else "cpu")
        if where == "gpu" and device.type != "cuda":
            raise BadInput("--dali_device gpu: it needs a GPU")
        super().__init__(store, workers, device if where == "gpu" else None)

    def run(self, plan: Plan) -> Images:
        self._empty: list[Batch] = []
        yield from super().run(plan)
        for batch in self._empty:
            yield batch, torch.empty((0, plan.size, plan.size, 3), dtype=torch.uint8)

    def _read_ahead(self, plan: Iterable[Batch]):
        return super()._read_ahead(self._not_empty(plan))

    def _not_empty(self, plan: Iterable[Batch]):
        """Yield the batches that DALI can run. A rank's part of the last batch of an epoch may be empty."""
        for batch in plan:
            if len(batch.ids):
                yield batch
            else:
                self._empty.append(batch)

    def _source(self) -> tuple:
        batch, parts = next(self._inputs)
        contents = [content for part in parts for content in part]
        index, crops = self.store.index, batch.crops
        anchors = np.stack([crops.top, crops.left], axis=1).astype(np.int32)
        shapes = np.stack([crops.height, crops.width], axis=1).astype(np.int32)
        flips = crops.flip.astype(np.int32)
        inputs: tuple[Any, ...] = contents, anchors, shapes, flips & 1, flips >> 1, batch.ids
        if index.rows:
            sizes = np.stack([index.heights[batch.ids], index.widths[batch.ids]], axis=1)
            inputs += (sizes.astype(np.float32),)
        self._in_flight.append((batch, inputs))  # DALI does not copy them: keep them until its output
        return inputs

    def _graph(self, size: int) -> tuple:
        fn, types = load_dali()
        resizes = self.store.index.rows > 0
        contents, anchors, shapes, horizontal, vertical, ids, *sizes = fn.external_source(
            self._source, num_outputs=6 + resizes, no_copy=True
        )
        decoder = (NVJPEG if self.device else {"device": "cpu"}) | {"output_type": types.RGB}
        box = {"axes": (0, 1), "normalized_anchor": False, "normalized_shape": False}
        if resizes:
            images = fn.decoders.image(contents, **decoder)
            images = fn.resize(images, size=sizes[0], interp_type=types.INTERP_LINEAR, antialias=True)
            images = fn.slice(images, anchors, shapes, **box)
        else:
            images = fn.decoders.image_slice(contents, anchors, shapes, **decoder, **box)
        return fn.flip(images, horizontal=horizontal, vertical=vertical), ids
