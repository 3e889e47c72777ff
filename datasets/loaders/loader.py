"""The loader of every job: a plan and an engine in, batches on the device and their receipt out."""

import collections
import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from datasets.sampling.receipt import Receipt
from datasets.sampling.sampler import Batch, Plan

Images = Generator[tuple[Batch, torch.Tensor], None, None]  # what Engine.run() yields
Change = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # of (images, labels)
_KEPT = 4  # batches whose memory is used again
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels / 255


class Engine(Protocol):
    """Produces the images of a plan: decoded, cut and resized, not normalised.

    reuses_memory: whether the images of a batch are overwritten when run() is resumed.
    """

    reuses_memory: bool

    def run(self, plan: Plan) -> Images:
        """Yield the plan's batches in order, each with uint8 images [n, H, W, C] on the host or a GPU."""

    def close(self) -> None:
        """End threads and processes, and free memory."""


def _references(arrays: list[np.ndarray]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]


_OURS = _references([np.empty(0)])[0]  # of an array that nothing but the list holds


class Copy(NamedTuple):
    """A batch that is on its way to the device. ready: None on the CPU."""

    images: torch.Tensor
    labels: torch.Tensor
    ready: torch.cuda.Event | None = None


class ToDevice:
    """Images uint8 [n, C, H, W] -> [n, C, H, W] in `dtype`, channels_last, (pixel / 255 - mean) / std.

    dtype: default torch's own, float32 unless that was changed; float16 is good to 4e-3. To a GPU a quarter
    of the bytes of float32 travel, from pinned memory, on a stream of their own, which a batch that is begun
    ahead shares with nobody; the caller's stream waits for them, not the caller. pinned: false copies from
    ordinary memory, and then the caller does wait.
    """

    def __init__(
        self,
        device: torch.device,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        dtype: torch.dtype | None = None,
        pinned: bool = True,
    ):
        self.device, self.dtype, self.pinned = device, dtype or torch.get_default_dtype(), pinned
        # Computed on the host, which then waits for the copies: the stream of the batches reads them.
        shift, scale = 255 * torch.tensor(mean), 1 / (255 * torch.tensor(std))
        self._shift, self._scale = (
            each.to(self.dtype).view(1, -1, 1, 1).to(device) for each in (shift, scale)
        )
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._results: list[np.ndarray] = []
        self._numpy = torch.empty(0, dtype=self.dtype).numpy().dtype
        self._row: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # width -> shift, scale [width * C]

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.end(self.move(images, labels))

    def begin(self, batch: Batch, images: torch.Tensor, change: Change | None = None) -> Copy:
        """Start the way of a batch with its images [n, H, W, C] to the device, as move() does."""
        labels = torch.tensor(batch.labels)  # a copy: the caller may change it
        return self.move(images.permute(0, 3, 1, 2), labels, change)

    def move(self, images: torch.Tensor, labels: torch.Tensor, change: Change | None = None) -> Copy:
        """Start the way to the device. The images given must stay as they are until wait().

        change: applied on the device before the images are normalised.
        """
        if self._stream is None:
            if change:
                images, labels = change(images, labels)
            return Copy(self._on_host(images), labels)
        if images.is_cuda:  # an engine on the GPU has put them there
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            images.record_stream(self._stream)  # torch does not reuse its memory while the stream reads it
        with torch.cuda.stream(self._stream):
            on_host, self._copied = not images.is_cuda, torch.cuda.Event(blocking=True)
            images, labels = self._move(images), self._move(labels)
            if on_host:
                self._copied.record()
            if change:
                images, labels = change(images, labels)
            images = self._normalised(images)
            ready = torch.cuda.Event(blocking=True)  # a host that waits for it sleeps
            ready.record()
            if not on_host:  # an engine's own memory is read until here
                self._copied = ready
        return Copy(images, labels, ready)

    def end(self, copy: Copy) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch, for the caller's stream."""
        if copy.ready:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copy.ready)
            copy.images.record_stream(current)  # its memory is not given away while the caller's stream reads
            copy.labels.record_stream(current)
        return copy.images, copy.labels

    def wait(self) -> None:
        """Until the last images are no longer needed where they were given."""
        if self._copied:
            self._copied.synchronize()
            self._copied = None

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.pinned and not tensor.is_cuda and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _normalised(self, images: torch.Tensor) -> torch.Tensor:
        images = torch.sub(images, self._shift).mul_(self._scale)  # reads uint8: two kernels
        return images.contiguous(memory_format=torch.channels_last)

    def _on_host(self, images: torch.Tensor) -> torch.Tensor:
        """The same numbers in memory that is used again, whole rows of pixels at a time: three channels by
        themselves are too short for the processor's vectors."""
        rows = images.permute(0, 2, 3, 1)
        if not rows.is_contiguous() or not len(rows):
            return self._normalised(images)
        *_, width, channels = rows.shape
        if width not in self._row:
            self._row[width] = self._shift.flatten().repeat(width), self._scale.flatten().repeat(width)
        shift, scale = self._row[width]
        result = torch.from_numpy(self._memory(rows.shape))
        numbers = result.view(-1, width * channels)
        numbers.copy_(rows.view(-1, width * channels)).sub_(shift).mul_(scale)
        return result.permute(0, 3, 1, 2)

    def _memory(self, shape: tuple[int, ...]) -> np.ndarray:
        """Memory for a batch: that of an earlier one, once nobody holds it. Fresh memory would cost more than
        what is written to it, in page faults.

        A tensor on it, and every view of that, holds a reference to the array. Not torch's own memory: its
        aligned blocks do not fit where such a block was freed (glibc before 2.38).
        """
        for count, result in zip(_references(self._results), self._results, strict=True):
            if count == _OURS and result.shape == shape:
                return result
        result = np.empty(shape, self._numpy)
        self._results = [*self._results[-_KEPT + 1 :], result]
        return result


class Loader:
    """Iterates (images [n, C, H, W] channels_last and normalised, labels int64 [n]) on `device`.

    plan: may be replaced between two epochs. mean, std: of pixels / 255. dtype, pinned: see ToDevice. On a
    GPU one batch is copied and normalised while the previous one is used. to_device: another last stage, for
    an engine that delivers no images (map_style.MoveToDevice).

    effects: an Effects (datasets/sampling/effects.py), applied after the engine; None by default. transform:
    your own function before it, (images uint8 [n, C, H, W], labels int64 [n]) -> the same, on the device, in
    new memory; None by default. torch's random numbers in it are a function of (seed, epoch, id of the first
    sample).

    waited: seconds that iterating has cost the caller so far. receipt: the digest of the batches that were
    yielded (datasets/sampling/receipt.py). len: steps of an epoch.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        device: torch.device,
        mean: tuple[float, ...] = MEAN,
        std: tuple[float, ...] = STD,
        dtype: torch.dtype | None = None,
        pinned: bool = True,
        to_device: Any = None,
    ):
        self.engine, self.plan = engine, plan
        self.to_device = to_device or ToDevice(device, mean, std, dtype, pinned)
        self.waited, self.receipt = 0.0, Receipt(plan.index.fingerprint)
        self._mean = mean
        self.effects: Any = None
        self.transform: Change | None = None
        self._ahead = 1 if device.type == "cuda" else 0  # on the CPU it would only take memory

    def seek(self, step: int) -> None:
        """Set the position: the next batch is that of global step `step`, counted from 0."""
        self.plan.seek(step)

    def epochs_from(self, step: int) -> Iterator[int]:
        """Yield the remaining epochs, each with the position set (BatchSampler.epochs_from)."""
        return self.plan.epochs_from(step)

    @property
    def total_steps(self) -> int | Any:
        """Return the steps of the whole training; None if it has no limit."""
        return self.plan.total_steps

    def commit(self, step: int, folder: str) -> None:
        """Chain the receipt up to step `step`, on all ranks; rank 0 appends it to FOLDER/receipt.bin."""
        self.receipt.commit(step, len(self), folder, self.to_device.device)

    def example(self, count: int) -> Any:
        """Return the inputs of `count` samples as a step gets them. Images are zeros: no data are read."""
        if example := getattr(self.engine, "example", None):
            return example(count)
        size = self.plan.size
        channels, height, width = getattr(self.plan.index, "image_shape", (3, size, size))
        images = torch.zeros(count, height, width, channels, device=self.to_device.device)
        return images.permute(0, 3, 1, 2)  # channels_last

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start = time.perf_counter()
        with contextlib.closing(self._copies()) as copies:
            for batch, copy in copies:
                self.receipt.add(*batch)
                delivered = self.to_device.end(copy)
                self.waited += time.perf_counter() - start
                yield delivered
                del copy, delivered  # its memory may be used again
                start = time.perf_counter()

    def _copies(self) -> Generator[tuple[Batch, Copy], None, None]:
        """Start the copies, as many batches ahead as the device can use."""
        begun: collections.deque[tuple[Batch, Copy]] = collections.deque()
        with contextlib.closing(self.engine.run(self.plan)) as batches:
            for batch, images in batches:
                try:
                    if self.effects or self.transform:
                        batch, change = self._plan_change(batch)
                        begun.append((batch, self.to_device.begin(batch, images, change)))
                    else:
                        begun.append((batch, self.to_device.begin(batch, images)))
                    del images
                    if len(begun) > self._ahead:
                        yield begun.popleft()
                finally:  # also if the epoch is left here: the engine then ends or uses its memory again
                    if self.engine.reuses_memory:
                        self.to_device.wait()
            while begun:
                yield begun.popleft()

    def _plan_change(self, batch: Batch) -> tuple[Batch, Change]:
        from datasets.loaders import pixels  # only a training with effects needs it

        return pixels.plan_change(self.plan, batch, self.effects, self.transform, self._mean)

    def close(self) -> None:
        """End the engine's threads and processes."""
        self.engine.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
