"""The loader of every job: a plan and an engine in, batches on the device and their receipt out."""

import collections
import contextlib
import time
from collections.abc import Generator, Iterator
from typing import Any, Protocol

import torch

from datasets.loaders.device import Copy, ToDevice
from datasets.sampling.plan import Batch, Plan
from datasets.sampling.receipt import Receipt

Images = Generator[tuple[Batch, torch.Tensor], None, None]  # what Engine.run() yields
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


class Loader:
    """Iterates (images [n, C, H, W] channels_last and normalised, labels int64 [n]) on `device`.

    plan: may be replaced between two epochs. mean, std: of pixels / 255. dtype, pinned: see ToDevice. On a
    GPU one batch is copied and normalised while the previous one is used.

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
    ):
        self.engine, self.plan = engine, plan
        self.to_device = ToDevice(device, mean, std, dtype, pinned)
        self.waited, self.receipt = 0.0, Receipt(plan.index.fingerprint)
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

    def example(self, count: int) -> torch.Tensor:
        """Return a batch of `count` images as a step gets them, all zeros, without reading data."""
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
                labels = torch.tensor(batch.labels)  # a copy: the caller may change it
                begun.append((batch, self.to_device.begin(images.permute(0, 3, 1, 2), labels)))
                del images
                if len(begun) > self._ahead:
                    yield begun.popleft()
                if self.engine.reuses_memory:
                    self.to_device.wait()
            while begun:
                yield begun.popleft()

    def close(self) -> None:
        """End the engine's threads and processes."""
        self.engine.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
