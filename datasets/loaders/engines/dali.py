"""An engine with NVIDIA DALI, which gets encoded bytes and boxes through an external source.

DALI's own readers and random operators would choose other samples and boxes. Here the plan chooses them, so a
run may change from or to this engine at any step. On the GPU, JPEGs are decoded by nvJPEG ("mixed").
"""

import collections
import concurrent.futures
import importlib
import importlib.util
import itertools
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch

from bootfile.ground.errors import BadInput, import_optional
from bootfile.loaders.loader import Data, Engine
from bootfile.sampling.plan import Batch, Plan
from datasets.folders.resize import BICUBIC, BILINEAR
from datasets.sampling.augment import Crop
from datasets.stores import forms
from datasets.stores.files import PairFiles, Reader, Store, work_ahead

DALI = "nvidia-dali-cuda120"  # the package's name for pip
_AHEAD = 3  # batches that are prepared while one is used
_IMAGES_PER_TASK = 8  # images that a thread reads in one task
# bytes for the largest image of ImageNet: without this padding nvJPEG reallocates buffers while training
_DEVICE_PADDING = 211025920
_HOST_PADDING = 140544512
_BOX = {"axes": (0, 1), "normalized_anchor": False, "normalized_shape": False}
# Interpolate chroma, as all other decoders here do. nvJPEG repeats it by default (option from CUDA 12.1 on).
NVJPEG = {"device": "mixed", "jpeg_fancy_upsampling": True}


def missing() -> str | None:
    """Return why DALI is not available; None if it is installed. It does not import DALI, which takes
    seconds: backends.reasons() calls it on every rank, whatever the backend of the job."""
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali"):
        return None
    return f"DALI is not installed: pip install {DALI} (Linux on x86-64)"


def load_dali() -> tuple[ModuleType, ModuleType]:
    """Return nvidia.dali's fn and types as modules: its type stubs lack constants and refuse ** arguments."""
    return importlib.import_module("nvidia.dali.fn"), importlib.import_module("nvidia.dali.types")


class Dali(Engine):
    """An engine for Loader. Raises BadInput if DALI cannot be imported.

    store: of datasets/stores.
    workers: threads.
    device: the GPU that decodes and crops; None: the CPU.
    interpolation: as in resize.fit().
    """

    reuses_memory = True

    def __init__(
        self, store: Store, workers: int, device: torch.device | None = None, interpolation: str = BILINEAR
    ):
        import_optional("nvidia.dali", "DALI cannot be imported", DALI)
        self.store = store
        self.workers = workers
        self.device = device
        self.interpolation = interpolation
        threads = concurrent.futures.ThreadPoolExecutor(workers, "reader")
        self._reader = Reader(store, threads, _IMAGES_PER_TASK)
        self._pipeline: Any = None  # DALI's, kept from epoch to epoch
        self._built_for = (0, 0)  # size, largest batch
        # of the epoch that runs: (batch, lists of its images) to come, and (batch, inputs) that DALI has
        self._inputs: Any = None
        self._in_flight = collections.deque[tuple[Batch, tuple]]()
        self._empty: list[Batch] = []  # batches of the epoch without a sample of this rank

    def run(self, plan: Plan) -> Data:
        """Yield the batches of an epoch with their images, and at the end those without a sample of this
        rank. A training loop asks for the next one when it has used the last, whose memory DALI then fills
        again."""
        self._empty = []
        self._inputs = work_ahead(self._with_samples(plan), self._reading, _AHEAD - 1)
        self._in_flight = collections.deque()
        pipeline = self._built(plan)
        ended = False  # stays False if the caller leaves the epoch or a batch fails
        try:
            while True:
                try:
                    # DALI works ahead: this asks for one more batch, the next line waits for the oldest
                    pipeline.schedule_run()
                    output, ids = pipeline.share_outputs()
                except StopIteration:
                    pipeline.reset()
                    ended = True
                    for batch in self._empty:
                        yield batch, torch.empty((0, plan.size, plan.size, 3), dtype=torch.uint8)
                    return
                except RuntimeError as error:
                    raise self._name_bad_file(error) from error
                batch, _ = self._in_flight.popleft()
                ids = np.array(ids.as_array()).reshape(-1)
                # the receipt was told these ids: a pipeline that lost one would deliver others from then on
                if not np.array_equal(ids, batch.ids):
                    raise RuntimeError(f"DALI delivered samples {ids[:5]}..., expected {batch.ids[:5]}...")
                yield batch, torch.from_dlpack(output.as_tensor())
                # the caller has asked for the next batch, so the images of this one are free
                pipeline.release_outputs()
        finally:
            self._inputs.close()
            if not ended:  # the next epoch would begin with the batches in flight
                self._pipeline = None

    def close(self) -> None:
        """Release the pipeline, DALI's memory of the GPU, and the threads."""
        self._pipeline = None
        if self.device is not None:
            backend = importlib.import_module("nvidia.dali.backend")  # not in DALI's stubs
            backend.ReleaseUnusedMemory()  # DALI would keep it for its next pipeline
        self._reader.close()

    def _with_samples(self, plan: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches that DALI can run. A rank's part of the last batch of an epoch may be empty."""
        for batch in plan:
            if len(batch.ids):
                yield batch
            else:
                self._empty.append(batch)

    def _reading(self, batch: Batch) -> list[concurrent.futures.Future]:
        """Return tasks that read the batch's images in order, each of them several images."""

        def prepare(places: range, contents: list) -> list[np.ndarray]:
            """Return what DALI gets of the samples of one task, in a thread of the reader: pixels, or the
            bytes of a JPEG or a PNG that it can decode, uint8 [bytes]."""
            samples = list(zip(batch.ids[places].tolist(), contents, strict=True))
            if self.store.form == "decoded":
                return [self.store.decode(*sample) for sample in samples]
            return [np.frombuffer(self.store.portable(*sample), np.uint8) for sample in samples]

        return self._reader.start(batch.ids, prepare)

    def _source(self) -> tuple:
        """Return DALI's inputs for a batch: images, corners and sizes of the boxes, _arguments(), and ids.
        Raises StopIteration at the end of the epoch."""
        batch, parts = next(self._inputs)
        contents = list(itertools.chain(*parts))
        crops = batch.crops
        anchors = np.stack([crops.top, crops.left], axis=1)
        shapes = np.stack([crops.height, crops.width], axis=1)
        # boxes are planned in the pixels of the file; packs keep smaller images
        if self.store.form != "encoded":
            index = self.store.index
            stored = np.stack(forms.sizes(index, batch.ids, self.store.form)[:2], axis=1)
            scale = stored[:, :1] / index.heights[batch.ids][:, None]
            anchors = np.minimum(np.rint(anchors * scale).astype(np.int64), stored - 1)
            shapes = np.clip(np.rint(shapes * scale).astype(np.int64), 1, stored - anchors)
        boxes = anchors.astype(np.int32), shapes.astype(np.int32)
        inputs = contents, *boxes, *self._arguments(batch.ids, crops), batch.ids
        self._in_flight.append((batch, inputs))  # DALI does not copy them: keep them until its output
        return inputs

    def _arguments(self, ids: np.ndarray, crops: Crop) -> tuple[np.ndarray, ...]:
        """Return the output sizes of a batch, float32 [n, 2]."""
        sizes = np.full((len(ids), 2), self._built_for[0], np.float32)
        sizes[crops.flip, 1] *= -1  # a negative width mirrors
        return (sizes,)

    def _name_bad_file(self, error: RuntimeError) -> Exception:
        """Return the error with the name of the bad file, which DALI does not know."""
        try:
            for batch, _ in self._in_flight:
                for id in batch.ids:
                    self.store.image(id)
        except BadInput as reason:
            return reason
        return error

    def _built(self, plan: Plan):
        """Return the pipeline, which is kept from epoch to epoch: building it takes seconds. It is new
        if the image size or the batch size has changed."""
        built_for = plan.size, plan.largest
        if self._pipeline is None or self._built_for != built_for:
            from nvidia.dali import Pipeline

            device_id = None if self.device is None else self.device.index or 0  # None: the CPU
            options = {"device_id": device_id, "prefetch_queue_depth": _AHEAD}
            options |= {"exec_async": True, "exec_pipelined": True}
            self._pipeline = Pipeline(plan.largest, self.workers, **options)
            self._built_for = built_for
            with self._pipeline:
                self._pipeline.set_outputs(*self._graph(plan.size))
            self._pipeline.build()
        return self._pipeline

    def _graph(self, size: int) -> tuple:
        """Return the outputs (images uint8 [size, size, 3], ids) for the inputs from _source()."""
        fn, types = load_dali()
        gpu = self.device is not None
        contents, anchors, shapes, sizes, ids = fn.external_source(self._source, num_outputs=5, no_copy=True)
        # only the box of a file is decoded; a pack of decoded images has the pixels already
        if self.store.form == "decoded":
            cut = fn.slice(contents.gpu() if gpu else contents, anchors, shapes, **_BOX)
        else:
            padding = {"device_memory_padding": _DEVICE_PADDING, "host_memory_padding": _HOST_PADDING}
            options = {**NVJPEG, **padding} if gpu else {}
            cut = fn.decoders.image_slice(contents, anchors, shapes, output_type=types.RGB, **options, **_BOX)
        kind = types.INTERP_CUBIC if self.interpolation == BICUBIC else types.INTERP_LINEAR
        return fn.resize(cut, size=sizes, interp_type=kind, antialias=True), ids


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
        super().__init__(store, workers, device if has_gpu and where != "cpu" else None)

    def _arguments(self, ids: np.ndarray, crops: Crop) -> tuple[np.ndarray, ...]:
        """Return the flips, int32 [n] each, and if images are resized, their sizes, float32 [n, 2]."""
        index = self.store.index
        flips = crops.flip.astype(np.int32)  # bit 0: horizontal, bit 1: vertical
        if not index.rows:
            return flips & 1, flips >> 1
        sizes = np.stack([index.heights[ids], index.widths[ids]], axis=1)
        return flips & 1, flips >> 1, sizes.astype(np.float32)

    def _graph(self, size: int) -> tuple:
        """Return the outputs (images, ids) for the inputs from _source()."""
        fn, types = load_dali()
        resizes = self.store.index.rows > 0
        contents, anchors, shapes, horizontal, vertical, *sizes, ids = fn.external_source(
            self._source, num_outputs=6 + resizes, no_copy=True
        )
        decoder = {"device": "cpu", "output_type": types.RGB} | (NVJPEG if self.device else {})
        if resizes:
            images = fn.decoders.image(contents, **decoder)
            images = fn.resize(images, size=sizes[0], interp_type=types.INTERP_LINEAR, antialias=True)
            images = fn.slice(images, anchors, shapes, **_BOX)
        else:
            images = fn.decoders.image_slice(contents, anchors, shapes, **decoder, **_BOX)
        return fn.flip(images, horizontal=horizontal, vertical=vertical), ids
