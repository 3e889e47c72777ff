"""An engine for pairs of images with NVIDIA DALI, which decodes, resizes, crops and flips by the plan."""

from collections.abc import Iterable

import numpy as np
import torch

from bootfile.ground.errors import BadInput
from bootfile.loaders.loader import Data
from bootfile.sampling.plan import Batch, Plan
from datasets.loaders.engines.dali import NVJPEG, Dali, load_dali
from datasets.sampling.augment import Crop
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
        has_gpu = device.type == "cuda"
        if where == "gpu" and not has_gpu:
            raise BadInput("--dali_device gpu: it needs a GPU")
        decodes_on: torch.device | None = None  # the CPU
        if where == "gpu" or (not where and has_gpu):
            decodes_on = device
        super().__init__(store, workers, decodes_on)
        self._empty: list[Batch] = []  # the batches of the epoch without a sample of this rank

    def run(self, plan: Plan) -> Data:
        """Yield the batches of an epoch, as Dali does, and last those without a sample of this rank."""
        self._empty = []
        yield from super().run(plan)
        for batch in self._empty:
            yield batch, torch.empty((0, plan.size, plan.size, 3), dtype=torch.uint8)

    def _read_ahead(self, plan: Iterable[Batch]):
        """Yield (batch, lists of its encoded images) as Dali does, without empty batches."""
        return super()._read_ahead(self._not_empty(plan))

    def _not_empty(self, plan: Iterable[Batch]):
        """Yield the batches that DALI can run. A rank's part of the last batch of an epoch may be empty."""
        for batch in plan:
            if len(batch.ids):
                yield batch
            else:
                self._empty.append(batch)

    def _arguments(self, ids: np.ndarray, crops: Crop) -> tuple[np.ndarray, ...]:
        """Return the flips, int32 [n] each, and if images are resized, their sizes, float32 [n, 2]."""
        index = self.store.index
        flips = crops.flip.astype(np.int32)  # bit 0: horizontal, bit 1: vertical
        if not index.rows:
            return flips & 1, flips >> 1
        sizes = np.stack([index.heights[ids], index.widths[ids]], axis=1)
        return flips & 1, flips >> 1, sizes.astype(np.float32)

    def _graph(self, size: int) -> tuple:
        """Return the outputs (images, ids) for the inputs from _source(). It is called once a pipeline."""
        fn, types = load_dali()
        resizes = self.store.index.rows > 0
        outputs = 6
        if resizes:  # and the sizes
            outputs = 7
        contents, anchors, shapes, horizontal, vertical, *sizes, ids = fn.external_source(
            self._source, num_outputs=outputs, no_copy=True
        )
        decoder = {"device": "cpu", "output_type": types.RGB}
        if self.device:
            decoder |= NVJPEG
        box = {"axes": (0, 1), "normalized_anchor": False, "normalized_shape": False}
        if resizes:
            images = fn.decoders.image(contents, **decoder)
            images = fn.resize(images, size=sizes[0], interp_type=types.INTERP_LINEAR, antialias=True)
            images = fn.slice(images, anchors, shapes, **box)
        else:
            images = fn.decoders.image_slice(contents, anchors, shapes, **decoder, **box)
        return fn.flip(images, horizontal=horizontal, vertical=vertical), ids
