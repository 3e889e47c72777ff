"""What all engines have in common: the plan goes in, batches on the device and the receipt come out."""

import collections
import contextlib
import time
from collections.abc import Iterator

import torch

from datasets.loaders.device import ToDevice
from datasets.sampling.plan import Plan
from datasets.sampling.receipt import Receipt

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels / 255


class FolderLoader:
    """Iterates (images [n, 3, size, size] channels_last and normalised, labels int64 [n]) on `device`.

    engine: has run(plan), a generator of (Batch, images uint8 [n, size, size, 3] on the host or the device,
    valid until it is resumed), and close(). plan: may be set anew between two epochs. mean, std: of pixels /
    255. dtype, pinned: as ToDevice takes them. On a GPU one batch is copied and normalised while the one
    before it is used. `len` is the number of batches of an epoch; `waited` the seconds that iterating has
    cost its caller so far; `receipt` says what was delivered.
    """

    def __init__(
        self,
        engine,
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
    def total_steps(self) -> int | None:
        """Steps of the whole training; None if it has no limit."""
        return self.plan.total_steps

    def commit(self, step: int, folder: str) -> None:
        """Chain the receipt up to step `step`, on all ranks; rank 0 appends it to FOLDER/receipt.bin."""
        self.receipt.commit(step, len(self), folder, self.to_device.device)

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self):
        start = time.perf_counter()
        with contextlib.closing(self._copies()) as copies:
            for batch, copy in copies:
                self.receipt.add(batch.ids, torch.from_numpy(batch.labels), batch.crops)
                delivered = self.to_device.end(copy)
                self.waited += time.perf_counter() - start
                yield delivered
                del copy, delivered  # its memory may be used again
                start = time.perf_counter()

    def _copies(self):
        """(Batch, Copy), begun as many batches ahead as the device can use."""
        begun = collections.deque()
        with contextlib.closing(self.engine.run(self.plan)) as batches:
            for batch, images in batches:
                labels = torch.from_numpy(batch.labels)
                begun.append((batch, self.to_device.begin(images.permute(0, 3, 1, 2), labels)))
                if len(begun) > self._ahead:
                    yield begun.popleft()
                self.to_device.wait()  # the engine fills this memory again
            while begun:
                yield begun.popleft()

    def close(self) -> None:
        """End the engine's processes and threads."""
        self.engine.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
