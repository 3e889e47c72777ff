"""What all engines have in common: the plan goes in, batches on the device and the receipt come out."""

import time

import torch

from datasets.loaders.device import ToDevice
from datasets.plan import Plan
from datasets.receipt import Receipt

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels / 255


class FolderLoader:
    """Iterates (images float [n, 3, size, size] channels_last and normalised, labels int64 [n]) on `device`.

    engine: has run(plan), a generator of (Batch, images uint8 [n, size, size, 3] on the host or the device,
    valid until it is resumed), and close(). `len` is the number of batches of an epoch; `waited` the seconds
    that iterating has cost its caller so far; `receipt` says what was delivered.
    """

    def __init__(self, engine, plan: Plan, device: torch.device):
        self.engine, self.plan = engine, plan
        self.to_device = ToDevice(device, MEAN, STD)
        self.waited, self.receipt = 0.0, Receipt()

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        self.plan.set_epoch(epoch, start_step)

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self):
        start = time.perf_counter()
        batches = self.engine.run(self.plan)
        try:
            for batch, images in batches:
                labels = torch.from_numpy(batch.labels)
                self.receipt.add(batch.ids, labels, batch.crops)
                delivered = self.to_device(images.permute(0, 3, 1, 2), labels)
                self.waited += time.perf_counter() - start
                yield delivered
                start = time.perf_counter()
                self.to_device.wait()  # the engine fills this memory again
        finally:
            batches.close()

    def close(self) -> None:
        """End the engine's processes and threads."""
        self.engine.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
