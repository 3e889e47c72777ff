"""Accelerate: a loop of 3 epochs on 2 processes with the loader of torchdata, continued in epoch 2.

OPTION: step of the checkpoint.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from start import OPTIONS, OUT, model, optimizer, receipt, record, samples, stop

STATE = os.path.join(OUT, "state")

set_seed(0)
config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
accelerator = Accelerator(cpu=True, dataloader_config=config)
loader = torch.utils.data.DataLoader(samples, 2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(receipt)
if os.path.exists(STATE):
    accelerator.load_state(STATE)
for epoch in range(receipt.step // len(loader), 3):
    for batch in loader:
        record(batch, epoch + 1)
        loss = model(batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if receipt.step == int(OPTIONS[0]):
            accelerator.save_state(STATE)
        stop()
