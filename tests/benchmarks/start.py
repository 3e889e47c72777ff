"""CPU seconds and peak memory of the start of jobs and verbs, as multiples of `import torch`.

    python -m tests.benchmarks.start
    python -m tests.benchmarks.start --rounds 3 --only "train.py,bare script"

Each contestant is a new process, in turns. CPU seconds are those of the process and of all that it started,
so that other programs on the machine change the figures less. The bare script does the work of `train.py
--max_steps 1`: the same data, network, optimizer, step, evaluation, weights, checkpoint, TensorBoard event.
"""

import argparse
import functools
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable

from bootfile.ground.errors import BadInput
from common.console.arguments import Parser
from common.ground.files import ROOT
from tests.benchmarks import rounds

BARE = """
import importlib.util, os, sys
import numpy as np
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

def block(inputs, outputs, stride):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(outputs)
            self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(outputs)
            self.short = nn.Sequential()
            if stride > 1 or inputs != outputs:
                conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
                self.short = nn.Sequential(conv, nn.BatchNorm2d(outputs))
        def forward(self, x):
            out = torch.relu(self.bn1(self.conv1(x)))
            return torch.relu(self.bn2(self.conv2(out)) + self.short(x))
    return Block()

def generated(count):
    labels = torch.randperm(count) % 10
    images = torch.randn(count, 3, 32, 32).mul_(40)
    patterns = nn.functional.interpolate(torch.randn(10, 3, 4, 4), size=(32, 32), mode="bilinear")
    images.add_((128 + 40 * patterns)[labels])
    return images.clamp_(0, 255).to(torch.uint8), labels

if sys.argv[1] == "digits":
    folder = os.path.dirname(importlib.util.find_spec("sklearn").origin)
    table = torch.from_numpy(np.loadtxt(f"{folder}/datasets/data/digits.csv.gz", delimiter=","))
    images, labels = (table[:, :-1].view(-1, 1, 8, 8) * (255 / 16)).to(torch.uint8), table[:, -1].long()
    train, test = (images[359:], labels[359:]), (images[:359], labels[:359])
else:
    train, test = generated(5000), generated(100)
sizes = [64, 64, 128, 256, 512]
stages = [nn.Conv2d(train[0].shape[1], 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
for place, (inputs, outputs) in enumerate(zip(sizes, sizes[1:])):
    stages += [block(inputs, outputs, 1 + (place > 0)), block(outputs, outputs, 1)]
model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
model.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
rows = torch.randperm(len(train[0]))[:128]
inputs, targets = train[0][rows].float().div(255).sub(0.3).div(0.4), train[1][rows]
loss = criterion(model(inputs.to(memory_format=torch.channels_last)), targets)
loss.backward()
optimizer.step()
model.eval()
with torch.no_grad():
    for inputs, targets in zip(test[0].split(250), test[1].split(250)):
        criterion(model(inputs.float().div(255).sub(0.3).div(0.4)), targets)
torch.save(model.state_dict(), f"{sys.argv[2]}/model.pth")
state = {"step": 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
torch.save(state, f"{sys.argv[2]}/checkpoint.pt")
writer = SummaryWriter(sys.argv[2])
writer.add_scalar("loss", loss.item(), 1)
writer.close()
"""
SMOKE, DIGITS = ("--custom_data=true", "--max_steps=1"), ("--dataset=digits", "--max_steps=1")
VERB = ("-m", "launch")


def contestants(folder: str) -> dict[str, tuple[str, ...]]:
    """Return name -> the words after `python`. folder: with a run of train.py in RUN."""
    run = f"{folder}/RUN"
    config = ("--config=launch/job.example.toml", "--platform=slurm", "--dry_run")
    return {
        "import torch": ("-c", "import torch"),
        "bare script, digits": ("-c", BARE, "digits", "OUT"),
        "train.py, digits": ("jobs/train.py", *DIGITS, "--output_dir=OUT"),
        "bare script, smoke test": ("-c", BARE, "generated", "OUT"),
        "train.py, smoke test": ("jobs/train.py", *SMOKE, "--output_dir=OUT"),
        "train.py --help": ("jobs/train.py", "--help"),
        "receipt RUN": (*VERB, "receipt", run),
        "receipt RUN RUN": (*VERB, "receipt", run, run),
        "report RUN": (*VERB, "report", run, "--to=OUT/page.html"),
        "submit --dry_run": (*VERB, "submit", "jobs/train_ddp.py", *config),
        "pack": (*VERB, "pack", "jobs/train_ddp.py", "--to=OUT"),
        **{
            f"{verb} --help": (*VERB, verb, "--help") for verb in ("new", "check", "report", "prove", "bench")
        },
    }


def measure(words: tuple[str, ...], peaks: list[float]) -> float:
    """Run a program and return its CPU seconds, with those of its children. peaks: gets its memory in MB.
    OUT in the words is a temporary folder. Raises BadInput if it fails."""
    with tempfile.TemporaryDirectory() as output, tempfile.TemporaryFile() as errors:
        command = [
            sys.executable,
            *(output if word == "OUT" else word.replace("=OUT", f"={output}") for word in words),
        ]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise BadInput(f"{words}: {rounds.tail(errors.read().decode())}")
    peaks.append(usage.ru_maxrss / 1024)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser: Parser = rounds.make_parser(__doc__, rounds=5)
    parser.add_argument("--only", type=str, default="", help="parts of names, with commas (default: all)")
    args: argparse.Namespace = parser.parse_args()
    with rounds.conditions(), tempfile.TemporaryDirectory() as folder:
        measure(("jobs/train.py", *DIGITS, f"--output_dir={folder}/RUN"), [])
        peaks: dict[str, list[float]] = {}
        chosen: dict[str, Callable[[], float]] = {}
        for name, words in contestants(folder).items():
            if name == "import torch" or any(part in name for part in args.only.split(",")):
                chosen[name] = functools.partial(measure, words, peaks.setdefault(name, []))
        rounds.print_ratios("start", rounds.take_turns(chosen, args.rounds), ".2f", "CPU seconds")
        least = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts it for each child
        found = {name: max(own) for name, own in peaks.items() if max(own) > least}
        print("\npeak memory in MB: " + ", ".join(f"{name} {own:.0f}" for name, own in found.items()))


if __name__ == "__main__":
    main()
