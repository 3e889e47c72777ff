"""PyTorch: a cosine of the learning rate, whose scheduler is created after or before the checkpoint is loaded.

OPTIONS: "after" or "before".
"""

import torch
from start import OPTIONS, batches, load, optimizer, receipt, save, train

Cosine = torch.optim.lr_scheduler.CosineAnnealingLR
if OPTIONS[0] == "after":
    state = load()
    scheduler = Cosine(optimizer, 24)
else:
    scheduler = Cosine(optimizer, 24)
    state = load()
if state is not None:
    scheduler.load_state_dict(state)
for batch in batches(24):
    train(batch)
    scheduler.step()
    if receipt.step % 2 == 0:
        save(scheduler.state_dict())
