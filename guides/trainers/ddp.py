"""Train a small network with DistributedDataParallel. It saves after each epoch; --resume continues."""

import argparse
import os

import torch

from bootfile import Receipt

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--seeded", action="store_true")
args = parser.parse_args()
rank, world_size = (int(os.environ.get(*each)) for each in (("RANK", 0), ("WORLD_SIZE", 1)))
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "0")
torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
torch.manual_seed(0)
images = torch.randn(256, 16)
samples = torch.utils.data.TensorDataset(images, images.argmax(1))
sampler = torch.utils.data.DistributedSampler(samples, world_size, rank)
loader = torch.utils.data.DataLoader(samples, 32 // world_size, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
os.makedirs(args.out, exist_ok=True)
first = 0
if args.resume:
    state = torch.load(f"{args.out}/last.pt")
    first = state["epoch"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
receipt = Receipt(args.out, rank=rank, world_size=world_size, first_step=first * len(loader))
for epoch in range(first, 6):
    sampler.set_epoch(epoch)
    if args.seeded:
        torch.manual_seed(epoch)  # dropout draws from it: no checkpoint has its state
    for inputs, targets in receipt.watch(loader):
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, f"{args.out}/new.pt")
        os.replace(f"{args.out}/new.pt", f"{args.out}/last.pt")
