"""Accelerate: a loop of 3 epochs with a custom sampler, whose order depends on set_epoch.

OPTIONS: what chooses the order ("sampler": a sampler, "batches": a batch sampler).
"""

import torch
from accelerate import Accelerator
from start import OPTIONS, WORLD_SIZE, model, optimizer, record, samples

BATCH = 4 // WORLD_SIZE


class Sampler(torch.utils.data.Sampler):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from torch.randperm(len(samples), generator=torch.Generator().manual_seed(self.epoch)).tolist()

    def __len__(self):
        return len(samples)


class BatchSampler(Sampler):
    batch_size, drop_last = BATCH, False

    def __iter__(self):
        order = list(super().__iter__())
        yield from (order[first : first + BATCH] for first in range(0, len(order), BATCH))

    def __len__(self):
        return len(samples) // BATCH


if OPTIONS[0] == "batches":
    loader = torch.utils.data.DataLoader(samples, batch_sampler=BatchSampler())
else:
    loader = torch.utils.data.DataLoader(samples, BATCH, sampler=Sampler())
accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    loader.set_epoch(epoch)
    for batch in loader:
        record(batch, epoch + 1)
        accelerator.backward(model(batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
