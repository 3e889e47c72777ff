"""Train on several processes: torchrun --nproc-per-node 2 after.py OUT"""

import os
import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from bootfile import Exact, torch_loader

torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
out = sys.argv[1]
torch.manual_seed(0)
train_set = TensorDataset(torch.randn(1000, 8), torch.randn(1000, 1))
sampler = DistributedSampler(train_set)
loader = torch_loader(DataLoader(train_set, 16, sampler=sampler), torch.device("cpu"), epochs=3)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
forward = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(loader))
run = Exact(out, loader, model=model, forward=forward, optimizer=optimizer, scheduler=schedule, save_every=10)
for _ in loader.epochs_from(run.resume()):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(forward(inputs), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        if run.end_step().save:
            run.save()
run.close()
os.makedirs(out, exist_ok=True)
if torch.distributed.get_rank() == 0:
    torch.save(model.state_dict(), os.path.join(out, "last.pt"))
torch.distributed.destroy_process_group()
