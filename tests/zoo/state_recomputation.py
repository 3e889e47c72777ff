"""PyTorch: a part of the model is computed again in the backward pass (torch.utils.checkpoint).

OPTIONS: "again" or "once"; "group" for GroupNorm, which has no statistics, in place of BatchNorm.
"""

import torch
from start import OPTIONS, batches, receipt, write
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
norm = torch.nn.GroupNorm(2, 4) if "group" in OPTIONS else torch.nn.BatchNorm1d(4)
first, last = torch.nn.Sequential(torch.nn.Linear(4, 4), norm), torch.nn.Linear(4, 1)
model = torch.nn.Sequential(first, last)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in batches(24):
    optimizer.zero_grad()
    features = checkpoint(first, batch, use_reentrant=False) if OPTIONS[0] == "again" else first(batch)
    last(features).square().mean().backward()
    optimizer.step()
write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": receipt.step})
