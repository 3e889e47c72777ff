"""A training script as users write them: its checkpoint has all that a restart needs, except for one --bug.

Each epoch ends with a checkpoint. Three bugs need one in the middle of an epoch. With --saves N, the script
kills itself after the N-th checkpoint, as a platform does it.
"""

import argparse
import copy
import os
import random
import signal
import time

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--bug", default="none")
parser.add_argument("--saves", type=int, default=-1)
args = parser.parse_args()
BUG = args.bug
EPOCHS, BATCH, WARMUP = 12, 8, 40
EVERY = 3 if BUG in ("order", "repeated_step", "accumulation") else 6  # batches; 6 are an epoch
SUMMED = 2 if BUG == "accumulation" else 1  # batches of an optimizer step

torch.set_num_threads(1)  # the results do not depend on the machine
torch.manual_seed(0)
np.random.seed(0)
random.seed(0)
generator = torch.Generator().manual_seed(3)
data = TensorDataset(torch.rand(48, 6), torch.randint(0, 4, (48,)))
model = torch.nn.Sequential(
    torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
)
if BUG == "dropout":
    model.insert(3, torch.nn.Dropout(0.3))
ema = copy.deepcopy(model)
if BUG == "sgd_optimizer":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
if BUG == "cosine":
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=8)
sampler = None
if BUG in ("loader_generator", "shuffle"):
    order = generator if BUG == "loader_generator" else None
    loader = DataLoader(data, BATCH, shuffle=True, generator=order)
else:
    sampler = DistributedSampler(data, 1, 0, seed=1)
    loader = DataLoader(data, BATCH, sampler=sampler)

progress = {"epoch": 0, "batch": 0, "step": 0, "best": 1e9, "patience": 0}
parts = {"model": model, "ema": ema, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
path = os.path.join(args.out, "last.pt")
os.makedirs(args.out, exist_ok=True)
if args.resume and os.path.exists(path):
    saved = torch.load(path, weights_only=False)
    if BUG == "buffers":
        model.load_state_dict(saved.pop("model"), strict=False)
    for name, part in parts.items():
        if name in saved:
            part.load_state_dict(saved[name])
    progress.update(saved["progress"])
    if "random" in saved:
        torch.set_rng_state(saved["random"])
    if "numpy" in saved:
        np.random.set_state(saved["numpy"])
    if "python" in saved:
        random.setstate(saved["python"])
    if "generator" in saved:
        generator.set_state(saved["generator"])

LEFT_OUT = {  # bug -> what its checkpoint does not have
    "cosine": ["scheduler"], "sgd_optimizer": ["optimizer"], "all": ["optimizer", "scheduler", "random"],
    "dropout": ["random"], "augmentation": ["random"], "shuffle": ["random"],
    "loader_generator": ["generator"], "mask_generator": ["generator"],
}  # fmt: skip
IN_PROGRESS = {"epoch": "epoch", "warmup": "step", "best": "best", "patience": "patience", "order": "batch"}


def save():
    """Write the checkpoint."""
    state = {name: part.state_dict() for name, part in parts.items()}
    state["progress"] = dict(progress)
    state |= {"random": torch.get_rng_state(), "generator": generator.get_state()}
    state |= {"numpy": np.random.get_state(), "python": random.getstate()}
    for name in LEFT_OUT.get(BUG, [BUG]):
        state.pop(name, None)
    if BUG == "buffers":
        state["model"] = dict(model.named_parameters())
    state["progress"].pop(IN_PROGRESS.get(BUG), None)
    if BUG == "repeated_step":
        state["progress"]["batch"] -= 1
    torch.save(state, f"{args.out}/new")
    os.replace(f"{args.out}/new", path)
    args.saves -= 1
    if args.saves == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)  # an epoch of a real network takes longer


def change(inputs):
    """Return a batch with the augmentation of a bug."""
    if BUG == "numpy":
        inputs = inputs + torch.from_numpy(np.random.normal(0, 0.1, inputs.shape)).float()
    if BUG == "python":
        inputs = inputs * random.choice([0.9, 1.1])
    if BUG == "augmentation":
        inputs = inputs + 0.1 * torch.randn(inputs.shape)
    if BUG == "mask_generator":
        inputs = inputs * torch.bernoulli(torch.full(inputs.shape, 0.8), generator=generator)
    return inputs


for epoch in range(progress["epoch"], EPOCHS):
    if sampler and BUG != "set_epoch":
        sampler.set_epoch(epoch)
    for number, (inputs, labels) in enumerate(loader):
        if number < progress["batch"]:
            continue
        progress["batch"] = number + 1
        progress["step"] += 1
        if BUG == "warmup":
            optimizer.param_groups[0]["lr"] = 0.02 * min(1, progress["step"] / WARMUP)
        loss = cross_entropy(model(change(inputs)), labels)
        (scaler.scale(loss) if BUG == "scaler" else loss).backward()
        if BUG == "scaler":
            if scaler.get_scale() > 2**12:  # this float16 gradient would overflow
                model[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        elif progress["step"] % SUMMED == 0:
            optimizer.step()
        if progress["step"] % SUMMED == 0:
            optimizer.zero_grad()
            for average, weight in zip(ema.parameters(), model.parameters(), strict=True):
                average.data.lerp_(weight.data, 0.1)
        if progress["batch"] % EVERY == 0 and progress["batch"] < 6:
            save()
    progress["batch"] = 0
    progress["epoch"] += 1
    if BUG != "warmup":
        scheduler.step()
    model.eval()
    with torch.no_grad():
        value = cross_entropy(model(data.tensors[0]), data.tensors[1]).item()
    model.train()
    if BUG in ("patience", "best"):
        value = [1.40, 1.30, 1.35, 1.36, 1.37, 1.38, 1.39, 1.40, 1.41, 1.42, 1.43, 1.44][epoch]
    progress["patience"] += 1
    if value < progress["best"]:
        progress["best"] = value
        progress["patience"] = 0
        torch.save({"model": model.state_dict(), "loss": value}, f"{args.out}/best.pt")
    save()
    if BUG == "patience" and progress["patience"] >= 6:
        break
torch.save({"model": model.state_dict(), "ema": ema.state_dict()}, f"{args.out}/final.pt")
