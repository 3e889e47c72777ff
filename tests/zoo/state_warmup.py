"""warmup-scheduler: 4 steps of warm-up and then a cosine, a step of the scheduler after each step.

OPTIONS: "plain" for the cosine without warm-up.
"""

import os

import torch
from start import OPTIONS, OUT, batches, load, optimizer, receipt, save, train
from warmup_scheduler import GradualWarmupScheduler

STATE = os.path.join(OUT, "scheduler-{}.bin")  # has objects: `launch prove` does not read it

scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
if "plain" not in OPTIONS:
    scheduler = GradualWarmupScheduler(optimizer, multiplier=1, total_epoch=4, after_scheduler=scheduler)
if load() is not None:
    scheduler.load_state_dict(torch.load(STATE.format(receipt.step), weights_only=False))
for batch in batches(24):
    train(batch)
    scheduler.step()
    if receipt.step % 2 == 0:
        torch.save(scheduler.state_dict(), STATE.format(receipt.step))
        save({})
