"""A plain training loop. Every 10 steps it saves what a restart needs, except --leave_out."""

import argparse
import copy
import os
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--resume")
parser.add_argument("--leave_out", help="optimizer, schedule, random, position, buffers, ema or everything")
args = parser.parse_args()
os.makedirs(args.out, exist_ok=True)
STEPS, BATCH = 120, 8

torch.manual_seed(0)
images, labels = torch.rand(96, 3, 8, 8), torch.randint(0, 4, (96,))
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Dropout(0.3),
    torch.nn.Flatten(), torch.nn.Linear(288, 4),
)  # fmt: skip
ema = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
first = position = 0  # of the training, of the data
if args.resume and os.path.exists(args.resume) and args.leave_out != "everything":
    saved = torch.load(args.resume, weights_only=True)
    first = saved["step"]
    position = saved.get("position", 0)
    model.load_state_dict(saved["model"], strict=False)
    ema.load_state_dict(saved.get("ema", model.state_dict()))
    for name, part in {"optimizer": optimizer, "schedule": schedule}.items():
        if name in saved:
            part.load_state_dict(saved[name])
    if "random" in saved:
        torch.set_rng_state(saved["random"])

for step in range(first + 1, STEPS + 1):
    order = torch.randperm(96, generator=torch.Generator().manual_seed(position // 12))
    ids = order[position % 12 * BATCH :][:BATCH]
    position += 1
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images[ids]), labels[ids]).backward()
    optimizer.step()
    schedule.step()
    for average, each in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
        average.copy_(0.9 * average + 0.1 * each)
    time.sleep(0.03)  # a step of a real network takes longer
    if step % 10 == 0:
        state = {
            "step": step, "position": position, "model": model.state_dict(), "ema": ema.state_dict(),
            "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
            "random": torch.get_rng_state(),
        }  # fmt: skip
        if args.leave_out == "buffers":
            state["model"] = dict(model.named_parameters())
        state.pop(args.leave_out, None)
        torch.save(state, f"{args.out}/new")
        os.replace(f"{args.out}/new", f"{args.out}/last.pt")
torch.save({"model": model.state_dict(), "ema": ema.state_dict()}, f"{args.out}/final.pt")
