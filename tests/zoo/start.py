"""What each program of the zoo needs: its arguments, a tiny data set, and the receipt of this start.

    python PROGRAM.py OUT STEPS [OPTION ...]

The program trains up to step STEPS and is then killed (SIGKILL), as a platform does it. If OUT has a
checkpoint, the program continues from it. The program chooses the steps of its checkpoints. The variables
ZOO_PACKAGE and ZOO_VERSION name the release that is examined; another one is refused.
"""

import importlib.metadata
import os
import signal
import sys
import time

import torch

from bootfile import Receipt

PACKAGE, VERSION = os.environ["ZOO_PACKAGE"], os.environ["ZOO_VERSION"]
if importlib.metadata.version(PACKAGE).partition("+")[0] != VERSION:
    sys.exit(f"expected {PACKAGE} {VERSION}, got {importlib.metadata.version(PACKAGE)}")
OUT, STEPS, OPTIONS = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SAVED = os.path.join(OUT, "saved.pt")  # for programs that choose the place of their checkpoint

IDS = "id" if "ids" in OPTIONS else None
samples = torch.rand(32, 4, generator=torch.Generator().manual_seed(0))  # 8 steps in an epoch of batches of 4
receipt = Receipt(OUT, seed=0, rank=RANK, world_size=WORLD_SIZE, ids=IDS)


class Regression(torch.nn.Module):
    """A model with one layer. It returns its loss, as the trainers expect it."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    power = 2  # exponent of the output in the loss

    def forward(self, x, **others):
        return {"loss": self.layer(x).pow(self.power).mean()}


with torch.random.fork_rng():
    torch.manual_seed(0)
    model = Regression()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(batch):
    """Train one step, for programs that have no trainer. batch: [n, 4]."""
    optimizer.zero_grad()
    model(batch)["loss"].backward()
    if torch.distributed.is_initialized():
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= WORLD_SIZE
    optimizer.step()


def record(batch, epoch=1):
    """Record the batch of a step. epoch: its number, from 1 on."""
    receipt.add(batch, epoch)


def batches(last):
    """Yield the batches of the steps up to `last` that are left, in the order of the samples."""
    for step in range(receipt.step, last):
        batch = samples.view(8, 4, 4)[step % 8][RANK::WORLD_SIZE]
        record(batch, step // 8 + 1)
        yield batch


def avoid_rounding():
    """Make the arithmetic exact: the gradient is a mean of small integers, the learning rate a power of 2.

    Then two ways to the same mathematical result, such as 1 and 2 processes, must give the same bits.
    """
    samples.copy_(torch.arange(128).remainder(5).view(32, 4))
    model.power = 1
    torch.nn.init.zeros_(model.layer.weight)
    torch.nn.init.zeros_(model.layer.bias)
    optimizer.param_groups[0]["lr"] = 2**-4


def stop():
    """Kill this process if STEPS steps are done."""
    if receipt.step >= STEPS:
        os.kill(os.getpid(), signal.SIGKILL)


def load():
    """Return what save() wrote and set the first step of the receipt; None if this is the first start."""
    if not os.path.exists(SAVED):
        return None
    saved = torch.load(SAVED, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    receipt.load_state_dict(saved["receipt"])
    return saved["data"]


def save(data):
    """Write a checkpoint. data: the state of the loader or of the trainer's accessories."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    write({**state, "receipt": receipt.state_dict(), "step": receipt.step, "data": data})


def write(state):
    """Replace the checkpoint. Then wait: `launch prove` counts the writes, every 5 ms."""
    torch.save(state, f"{SAVED}.new")
    os.replace(f"{SAVED}.new", SAVED)
    time.sleep(0.05)
