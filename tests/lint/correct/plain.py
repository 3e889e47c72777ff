"""A plain loop on one device. A restart continues with all that the loop changes."""

import argparse
import copy
import os
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--resume")
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

torch.manual_seed(0)
np.random.seed(0)
random.seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.rand(96, 8), torch.randint(0, 4, (96,)))
loader = DataLoader(data, 8, shuffle=True, generator=generator)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4)).to(
    device
)
ema = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
scaler = torch.amp.GradScaler(device.type)
start_epoch = 0
best_count = 0.0
patience = 0

if args.resume and os.path.exists(args.resume):
    checkpoint = torch.load(args.resume, map_location=device, weights_only=False)
    model.load_state_dict(checkpoint["model"])
    ema.load_state_dict(checkpoint["ema"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    scaler.load_state_dict(checkpoint["scaler"])
    generator.set_state(checkpoint["generator"].cpu())
    torch.set_rng_state(checkpoint["torch"].cpu())
    np.random.set_state(checkpoint["numpy"])
    random.setstate(checkpoint["python"])
    start_epoch = checkpoint["epoch"] + 1
    best_count = checkpoint["best_count"]
    patience = checkpoint["patience"]

for epoch in range(start_epoch, args.epochs):
    correct = 0
    for inputs, labels in loader:
        inputs = inputs.to(device) + 0.1 * torch.randn(inputs.shape, device=device)
        inputs = inputs * float(np.random.uniform(0.9, 1.1)) + random.random() * 0.01
        labels = labels.to(device)
        optimizer.zero_grad()
        outputs = model(inputs)
        scaler.scale(torch.nn.functional.cross_entropy(outputs, labels)).backward()
        scaler.step(optimizer)
        scaler.update()
        correct += (outputs.argmax(1) == labels).sum().item()
        for average, weight in zip(ema.parameters(), model.parameters(), strict=False):
            average.data.lerp_(weight.data, 0.1)
    scheduler.step()
    patience += 1
    if correct > best_count:
        best_count = correct
        patience = 0
        torch.save(model.state_dict(), os.path.join(args.out, "best.pt"))
    state = {
        "model": model.state_dict(),
        "ema": ema.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
        "generator": generator.get_state(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "epoch": epoch,
        "best_count": best_count,
        "patience": patience,
    }
    torch.save(state, os.path.join(args.out, "last.pt.new"))
    os.replace(os.path.join(args.out, "last.pt.new"), os.path.join(args.out, "last.pt"))
    if patience >= 5:
        break
