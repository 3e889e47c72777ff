"""Train on several processes: torchrun --nproc-per-node 2 any_number.py OUT"""

import os
import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from bootfile import BatchSampler, Exact, map_style_loader

torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
out = sys.argv[1]
torch.manual_seed(0)
train_set = TensorDataset(torch.randn(1000, 8), torch.randn(1000, 1))
rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
sampler = BatchSampler(len(train_set), 32, seed=0, epochs=3).for_rank(rank, processes)  # 32 in all
loader = map_style_loader(train_set, sampler, torch.device("cpu"))
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
if rank == 0:
    torch.save(model.state_dict(), os.path.join(out, "last.pt"))
torch.distributed.destroy_process_group()
