"""PyTorch: a linear warm-up and a cosine (SequentialLR), created after or before the checkpoint is loaded.

OPTIONS: "after" or "before".
"""

from start import OPTIONS, batches, load, optimizer, receipt, save, train
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

state = load() if OPTIONS[0] == "after" else None
parts = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, 20)]
scheduler = SequentialLR(optimizer, parts, [4])
if OPTIONS[0] == "before":
    state = load()
if state is not None:
    scheduler.load_state_dict(state)
for batch in batches(24):
    train(batch)
    scheduler.step()
    if receipt.step % 2 == 0:
        save(scheduler.state_dict())
