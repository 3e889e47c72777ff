"""Accelerate: a loop of 4 epochs with save_state, load_state and skip_first_batches.

OPTIONS: step of the checkpoint; loader (see DataLoaderConfiguration): "default", "seedable", or "stateful",
which is torchdata's and skips by itself; "epoch" if the loop calls set_epoch, "loader" if it leaves the count
of epochs to the loader.
"""

import os

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from start import OPTIONS, OUT, WORLD_SIZE, model, optimizer, receipt, record, samples, stop

SAVE, KIND, COUNTER = int(OPTIONS[0]), OPTIONS[1], OPTIONS[2]
STATE = os.path.join(OUT, "state")

set_seed(0)
is_stateful = KIND == "stateful"
config = DataLoaderConfiguration(use_seedable_sampler=KIND != "default", use_stateful_dataloader=is_stateful)
accelerator = Accelerator(cpu=True, dataloader_config=config)
loader = torch.utils.data.DataLoader(samples, 4 // WORLD_SIZE, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(receipt)
if os.path.exists(STATE):
    accelerator.load_state(STATE)
first_epoch, skipped = divmod(receipt.step, len(loader))
skipped *= not is_stateful
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
