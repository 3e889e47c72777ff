"""The loader of images: they are normalised on the device, with effects and a transform of the user."""

import functools
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from bootfile.ground import accelerator
from bootfile.loaders.loader import Copy, Engine, Loader, Stage
from bootfile.sampling.plan import Batch, Plan

# (images uint8 [n, C, H, W], labels) -> the same in new memory
Change = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_KEPT = 4  # batches whose memory is reused
_BLOCK = 2**19  # numbers that are normalised together: 2 MB of float32
# of ImageNet's pixels / 255
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def _references(arrays: list[np.ndarray]) -> list[int]:
    """Return how many references each array has. ToDevice asks for each batch: an array that only its list
    refers to is free for the next batch."""
    return [sys.getrefcount(array) for array in arrays]


_OURS = _references([np.empty(0)])[0]  # count for an array that only the list refers to


class ToDevice(Stage):
    """A stage: images uint8 [n, C, H, W] -> `dtype` [n, C, H, W], channels_last, (pixel / 255 - mean) / std.

    dtype: default torch.get_default_dtype(). The error of float16 is up to 4e-3.
    A GPU receives uint8, a quarter of the bytes of float32, on a separate stream. The caller's stream waits
    for the copy; the caller does not.
    """

    def __init__(
        self,
        device: torch.device,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        dtype: torch.dtype | None = None,
    ):
        super().__init__(device)
        self.dtype = dtype or torch.get_default_dtype()
        shift = 255 * torch.tensor(mean)
        scale = 1 / (255 * torch.tensor(std))
        # these copies block the host, because another stream reads them: that of the batches
        self._shift = shift.to(device, self.dtype).view(1, -1, 1, 1)
        self._scale = scale.to(device, self.dtype).view(1, -1, 1, 1)
        self._copied: Any = None  # an event: the host's images of the last batch are copied
        self._results: list[np.ndarray] = []  # on the CPU: memory of the last batches, see _memory()
        self._numpy = torch.empty(0, dtype=self.dtype).numpy().dtype

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch on the device at once, for callers that have no loader."""
        return self.end(self.move(images, labels))

    def begin(self, batch: Batch, images: torch.Tensor, change: Change | None = None) -> Copy:
        """Start moving a batch with its images [n, H, W, C] to the device, as move() does."""
        labels = torch.tensor(batch.labels)  # a copy: the caller may change it
        return self.move(images.permute(0, 3, 1, 2), labels, change)

    def move(self, images: torch.Tensor, labels: torch.Tensor, change: Change | None = None) -> Copy:
        """Start moving images and labels to the device. The images must not change until wait() returns.
        change: applied on the device before the images are normalised."""
        if self.stream is None:
            images, labels = self.move_tensor(images), self.move_tensor(labels)
            if change:
                images, labels = change(images, labels)
            on_host = self.device.type == "cpu"
            return Copy(self._on_host(images) if on_host else self._normalised(images), labels)
        # a GPU: the copies and kernels are put on the stream of the batches, and this call returns at once
        device = accelerator.of(self.device)
        on_host = images.device.type == "cpu"
        if not on_host:  # from an engine on the GPU
            self.stream.wait_stream(device.current_stream(self.device))
            images.record_stream(self.stream)  # torch does not reuse its memory while the stream reads it
        with device.stream(self.stream):
            self._copied = accelerator.new_event(self.device)
            images = self.move_tensor(images)
            labels = self.move_tensor(labels)
            if on_host:
                self._copied.record()
            if change:
                images, labels = change(images, labels)
            images = self._normalised(images)
            # the stream of the training waits for it when the loop takes the batch
            ready = accelerator.new_event(self.device)
            ready.record()
            if not on_host:  # an engine's own memory is read until here
                self._copied = ready
        return Copy(images, labels, ready)

    def wait(self) -> None:
        """Block the host until the images of the last move() may change."""
        if self._copied:
            self._copied.synchronize()
            self._copied = None

    def move_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start the copy of a tensor to the device. The host does not wait for copies from pinned memory."""
        if self.stream and tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=bool(self.stream))

    def _normalised(self, images: torch.Tensor) -> torch.Tensor:
        """Return the images as the model gets them."""
        images = torch.sub(images, self._shift).mul_(self._scale)  # reads uint8: two kernels
        return images.contiguous(memory_format=torch.channels_last)

    def _on_host(self, images: torch.Tensor) -> torch.Tensor:
        """Return what _normalised() returns, in reused memory. It computes whole rows of pixels, because
        three channels are too few for the processor's vectors, and blocks that fit into its cache."""
        rows = images.permute(0, 2, 3, 1)
        if not rows.is_contiguous() or not len(rows):
            return self._normalised(images)
        *_, width, channels = rows.shape
        shift = self._shift.flatten().repeat(width)  # of a row of pixels
        scale = self._scale.flatten().repeat(width)
        memory = self._memory(rows.shape)
        pixels = rows.view(-1, width * channels)
        numbers = memory.reshape(pixels.shape)
        block = max(1, _BLOCK // (width * channels))  # rows

        def normalise(first: int, step: int) -> None:
            """Write the blocks that begin at row `first` and `step` rows apart: those of one thread."""
            for place in range(first, len(pixels), step):
                # a tensor made here is writable without inference_mode()
                part = torch.from_numpy(numbers[place : place + block])
                part.copy_(pixels[place : place + block]).sub_(shift).mul_(scale)

        # each thread takes every n-th block, so all end at about the same time
        threads = min(torch.get_num_threads(), -(-len(pixels) // block))
        if threads == 1:
            normalise(0, block)
        else:
            step = threads * block
            list(self._pool.map(normalise, range(0, step, block), itertools.repeat(step)))
        return torch.from_numpy(memory).permute(0, 3, 1, 2)

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        """The threads of _on_host(), started at its first large batch."""
        from datasets.loaders.threads import start_pool  # small batches start no pool

        return start_pool(torch.get_num_threads(), "normalise")

    def _memory(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return memory for a batch: that of an earlier batch if it is free. The page faults of new memory
        would cost more than writing the batch. _on_host() calls it for each batch. A tensor on the array and
        all its views hold a reference to the array. Torch's own memory is not used: glibc before 2.38 cannot
        put an aligned block into the space of a freed one."""
        for count, result in zip(_references(self._results), self._results, strict=True):
            if count == _OURS and result.shape == shape:
                return result
        result = np.empty(shape, self._numpy)
        self._results = [*self._results[-_KEPT + 1 :], result]
        return result


class ImageLoader(Loader):
    """A Loader of (images [n, C, H, W] channels_last and normalised, labels int64 [n]).

    engine, plan, device: as for Loader. The engine delivers uint8 images [n, H, W, C].
    mean, std: of pixels / 255.
    dtype: see ToDevice.
    `effects`: an Effects (datasets/sampling/effects.py), applied after the engine; None by default.
    `transform`: your own function, applied before the effects; None by default. It receives (images uint8
        [n, C, H, W], labels int64 [n]) on the device and returns the same in new memory. Torch's random
        numbers in it are a function of (seed, epoch, id of the first sample).
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        device: torch.device,
        mean: tuple[float, ...] = MEAN,
        std: tuple[float, ...] = STD,
        dtype: torch.dtype | None = None,
    ):
        self._normalise = ToDevice(device, mean, std, dtype)
        super().__init__(engine, plan, device, self._normalise)
        self._mean = mean
        self.effects: Any = None
        self.transform: Change | None = None
        self.division = getattr(plan.index, "division", "")  # for starts.jsonl

    def begin(self, batch: Batch, data: Any) -> tuple[Batch, Copy]:
        """Start moving a batch of the engine to the device, and add the parameters of the effects to it."""
        if not self.effects and not self.transform:
            return super().begin(batch, data)
        from datasets.loaders import pixels  # most jobs do not need it

        batch, change = pixels.plan_change(self.plan, batch, self.effects, self.transform, self._mean)
        return batch, self._normalise.begin(batch, data, change)

    def example(self, count: int, size: int | None = None) -> Any:
        """Return the inputs of `count` samples as a step gets them: images of zeros, so no data are read.
        size: their side, pixels (default: that of this epoch)."""
        size = size or self.plan.size
        channels, height, width = getattr(self.plan.index, "image_shape", (3, size, size))
        images = torch.zeros(count, height, width, channels, device=self.to_device.device)
        return images.permute(0, 3, 1, 2)  # channels_last
