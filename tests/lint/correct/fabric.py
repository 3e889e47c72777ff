"""Lightning Fabric: a state that fabric.save() writes and fabric.load() restores."""

import os

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

OUT = "out"
ACCUMULATE = 4


def main():
    fabric = L.Fabric(devices=2)
    fabric.launch()
    data = TensorDataset(torch.rand(96, 8), torch.randint(0, 4, (96,)))
    sampler = torch.utils.data.DistributedSampler(data, fabric.world_size, fabric.global_rank, seed=0)
    loader = fabric.setup_dataloaders(DataLoader(data, 8, sampler=sampler), use_distributed_sampler=False)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    model, optimizer = fabric.setup(model, optimizer)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "epoch": 0,
        "step": 0,
        "best_loss": 1e9,
    }
    path = os.path.join(OUT, "last.ckpt")
    if os.path.exists(path):
        fabric.load(path, state)
    for epoch in range(state["epoch"], 10):
        sampler.set_epoch(epoch)
        total = 0.0
        for number, (inputs, labels) in enumerate(loader):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            fabric.backward(loss / ACCUMULATE)
            total += loss.item()
            if (number + 1) % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
                state["step"] += 1
        scheduler.step()
        state["epoch"] = epoch + 1
        if total < state["best_loss"]:
            state["best_loss"] = total
            fabric.save(os.path.join(OUT, "best.ckpt"), {"model": model})
        fabric.save(path + ".new", state)
        if fabric.global_rank == 0:
            os.replace(path + ".new", path)


if __name__ == "__main__":
    main()
