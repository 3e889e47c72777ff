"""PyTorch: DistributedDataParallel and BatchNorm on 2 ranks: the statistics are those of a rank's samples.

OPTIONS: "mean" to reduce the statistics at the end, as timm's distribute_bn does it.
"""

import os

import torch
from start import OPTIONS, OUT, RANK, batches, receipt

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in batches(24):
    optimizer.zero_grad()
    wrapped(batch).square().mean().backward()
    optimizer.step()
if "mean" in OPTIONS:
    for name, buffer in model.named_buffers():
        if "running" in name:
            torch.distributed.all_reduce(buffer)
            buffer /= 2
folder = os.path.join(OUT, *["rank1"] * RANK)
os.makedirs(folder, exist_ok=True)
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": receipt.step}
torch.save(state, os.path.join(folder, "saved.pt"))
torch.distributed.destroy_process_group()
