"""PyTorch: a part of the model is computed again in the backward pass (torch.utils.checkpoint).

OPTIONS: "again" or "once"; "group" for GroupNorm, which has no statistics, in place of BatchNorm.
"""

import os

import torch
from start import OPTIONS, SAVED, batches, receipt, write
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
norm = torch.nn.GroupNorm(2, 4) if "group" in OPTIONS else torch.nn.BatchNorm1d(4)
first, last = torch.nn.Sequential(torch.nn.Linear(4, 4), norm), torch.nn.Linear(4, 1)
model = torch.nn.Sequential(first, last)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if os.path.exists(SAVED):
    saved = torch.load(SAVED)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    receipt.load_state_dict({"step": saved["step"]})
for batch in batches(24):
    optimizer.zero_grad()
    features = checkpoint(first, batch, use_reentrant=False) if OPTIONS[0] == "again" else first(batch)
    last(features).square().mean().backward()
    optimizer.step()
    if receipt.step % 2 == 0:
        write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": receipt.step})
