"""Accelerate: a loop of 4 epochs with save_state, load_state and skip_first_batches.

OPTIONS: step of the checkpoint; sampler ("default" or "seedable", see DataLoaderConfiguration); "epoch" if
the loop calls set_epoch, "loader" if it leaves the count of epochs to the loader.
"""

import os

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from start import OPTIONS, OUT, model, optimizer, receipt, record, samples, stop

SAVE, SAMPLER, COUNTER = int(OPTIONS[0]), OPTIONS[1], OPTIONS[2]
STATE = os.path.join(OUT, "state")

set_seed(0)
config = DataLoaderConfiguration(use_seedable_sampler=SAMPLER == "seedable")
accelerator = Accelerator(cpu=True, dataloader_config=config)
loader = torch.utils.data.DataLoader(samples, 4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(receipt)
if os.path.exists(STATE):
    accelerator.load_state(STATE)
first_epoch, skipped = divmod(receipt.step, len(loader))
for epoch in range(first_epoch, 4):
    if COUNTER == "epoch":
        loader.set_epoch(epoch)
    rest = skip_first_batches(loader, skipped) if epoch == first_epoch and skipped else loader
    for batch in rest:
        record(batch, epoch + 1)
        loss = model(batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if receipt.step == SAVE:
            accelerator.save_state(STATE)
        stop()
