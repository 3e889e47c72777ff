"""A plain loop with exact order, workers and receipt, but without exact restarts of its weights."""

import os

import torch

from bootfile import BatchSampler, map_style_loader

train_set = torch.utils.data.TensorDataset(torch.arange(8000.0).view(1000, 8), torch.arange(1000.0))
sampler = BatchSampler(len(train_set), 32, seed=0, epochs=3)  # .for_rank(rank, world_size)
loader = map_style_loader(train_set, sampler, torch.device("cpu"))
if os.path.exists("results/loader.pt"):
    loader.load_state_dict(torch.load("results/loader.pt", weights_only=True))
for _ in loader.epochs_from(loader.step):
    for inputs, targets in loader:
        print(loader.step, inputs.sum().item(), targets.sum().item())  # in place of your step
        loader.commit(loader.step, "results")  # results/receipt.bin
    torch.save(loader.state_dict(), "results/new")
    os.replace("results/new", "results/loader.pt")  # a kill leaves the old file whole
