"""Training scripts of several styles, as users write them, and a process that runs them."""

import json

import pytest
import torch

from bootfile.fix.edits import CannotEdit, Script
from tests.conftest import run

# everything at the level of the module; a schedule of epochs
MODULE = '''\
"""Train a small network."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
inputs = torch.randn(64, 4)
targets = inputs.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for epoch in range(3):
    total = 0.0
    for i, (x, y) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(x), y) / 2
        loss.backward()
        total += loss.item()
        # two batches in one step of the optimizer
        if i % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
    print(f"epoch {epoch}: {total / len(loader):.4f}")
torch.save(model.state_dict(), sys.argv[1])
'''

# in main(), with options, a validation, the best weights, and clipped gradients
MAIN = """\
import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def evaluate(model, loader, device):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            correct += (model(x).argmax(1) == y).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--ordered", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    x = torch.randn(80, 6)
    y = (x[:, 0] > 0).long()
    train_set, test_set = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    train_loader = DataLoader(train_set, args.batch_size, shuffle=not args.ordered, num_workers=0)
    test_loader = DataLoader(test_set, batch_size=8)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    best, steps = 0.0, 0
    for epoch in range(1, args.epochs + 1):
        model.train()
        train_loss, correct = 0.0, 0
        for data, target in train_loader:
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            output = model(data)
            loss = F.cross_entropy(output, target)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            steps += 1
            train_loss += loss.item() * data.size(0)
            correct += (output.argmax(1) == target).sum().item()
        accuracy = evaluate(model, test_loader, device)
        print(f"{epoch} {train_loss / len(train_loader.dataset):.5f} {correct} {accuracy:.3f} {steps}")
        if accuracy >= best:
            best = accuracy
            torch.save(model.state_dict(), args.out)
    print("best", best)


if __name__ == "__main__":
    main()
"""

# a function for an epoch, batches that are dictionaries, and a scaler
HELPER = """\
import sys

import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, number):
        row = torch.full((3,), number / 48)
        return {"row": row + 0.1 * torch.randn(3), "mask": torch.ones(3), "answer": row.sum()}


def train_one_epoch(model, loader, optimizer, scaler):
    model.train()
    total, count = 0.0, 0
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", enabled=False):
            output = model(batch["row"] * batch["mask"]).squeeze(1)
            loss = torch.nn.functional.mse_loss(output, batch["answer"])
        if torch.isnan(loss):
            continue
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
        count += 1
    return total / max(count, 1)


def run(out, epochs=3):
    torch.manual_seed(3)
    train_loader = DataLoader(Rows(), batch_size=6, shuffle=True)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu")
    lowest = float("inf")
    for epoch in range(epochs):
        loss = train_one_epoch(model, train_loader, optimizer, scaler)
        lowest = min(lowest, loss)
        print(epoch, loss, lowest)
    torch.save({"model": model.state_dict()}, out)


if __name__ == "__main__":
    run(sys.argv[1])
"""

# methods of a class; a learning rate that depends on its counter of steps
CLASS = """\
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, out):
        self.out = out
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(40, 2), torch.randn(40, 1), torch.rand(40, 1))
        self.loader = DataLoader(data, batch_size=4, shuffle=True)
        self.step = 0

    def train(self, epochs):
        for epoch in range(epochs):
            self.train_epoch(epoch)
        torch.save(self.model.state_dict(), self.out)

    def train_epoch(self, epoch):
        for x, y, weight in self.loader:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.1 / (1 + self.step)
            loss = (weight * (self.model(x) - y) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
        print(epoch, self.step)


if __name__ == "__main__":
    torch.manual_seed(5)
    Trainer(sys.argv[1]).train(2)
"""

SCRIPTS = {"module": MODULE, "main": MAIN, "helper": HELPER, "class": CLASS}

# It has torch, and starts each group of runs as processes of its own. A run: folder, script, arguments,
# environment, and step -> signal, which comes at the end of this step.
_RUNNER = """
import json, os, runpy, sys, time, traceback
import torch._dynamo  # an optimizer imports it
import torch.nn.parallel
from bootfile.exact.loop import Exact
from bootfile.processes import signals

def start(run):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.chdir(run["folder"])
        os.environ.update(run["environment"])
        out = os.open(run["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.argv = [run["script"], *run["arguments"]]
        end_step = Exact.end_step
        def end(exact):
            if exact.loader.step == run["step"]:
                os.kill(os.getpid(), run["signal"])
                # another thread reads the signal: the few steps that are left may be faster
                while not signals.asked():
                    time.sleep(0.01)
            return end_step(exact)
        Exact.end_step = end
        runpy.run_path(run["script"], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)

torch.set_num_threads(1)
codes = []
for group in json.loads(sys.argv[1]):
    pids = [start(run) for run in group]
    codes.append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
print(json.dumps(codes))
"""


def describe(folder, script, *arguments, log="log.txt", step=0, signal=0, **variables):
    """Return a run of a script in a folder."""
    return {
        "folder": str(folder),
        "script": script,
        "arguments": arguments,
        "environment": variables,
        "log": log,
        "step": step,
        "signal": int(signal),
    }


def change(make, folder, text):
    """Return the text of a script that a function such as make_exact() has changed."""
    path = folder / "train.py"
    path.write_bytes(text.encode())
    script = Script(str(path), path.read_bytes())
    make(script)
    return script.render().decode()


def is_equal(first, second):
    """Return whether two lists or dicts have the same tensors."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def refuse(make, path, text):
    """Return the lines on what a change cannot place in a script."""
    path.write_text(text)
    script = Script(str(path), text.encode())
    with pytest.raises(CannotEdit) as error:
        make(script)
    return error.value.lines


def run_all(groups):
    """Run groups of processes, one after the other, and return the exit codes of each."""
    return json.loads(run("-c", _RUNNER, json.dumps(groups)).stdout.splitlines()[-1])
