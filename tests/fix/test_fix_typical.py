"""Scripts in the forms that public repositories have most, each with several faults: after the repairs a
restart is exact, a run without an interruption has the same weights, and an old checkpoint is loaded."""

import pytest
import torch

from bootfile.fix.engine import repair
from tests.fix.loops import describe, is_equal, run_all

HEAD = """\
import argparse
import os
import shutil

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
X = torch.randn(96, 8)
Y = (X[:, :4].sum(1) > 0).long()
trainset, testset = TensorDataset(X[:64], Y[:64]), TensorDataset(X[64:], Y[64:])
"""
KILL = 'if os.environ.get("KILL") == str(epoch):\n{0}    os._exit(9)'

# globals; the best epochs are saved before the schedule is stepped; the optimizer is made after the load
MODULE = """
parser = argparse.ArgumentParser()
parser.add_argument("--resume", "-r", action="store_true", help="resume from checkpoint")
args = parser.parse_args()
best_acc = 0  # best test accuracy
start_epoch = 0
trainloader = DataLoader(trainset, batch_size=16, shuffle=False)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
if args.resume:
    checkpoint = torch.load("./ckpt.pth")
    net.load_state_dict(checkpoint["net"])
    best_acc = checkpoint["acc"]
    start_epoch = checkpoint["epoch"]
optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)


def train(epoch):
    net.train()
    for inputs, targets in trainloader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()


def test(epoch):
    global best_acc
    acc = 100.0 * (net(X[64:]).argmax(1) == Y[64:]).sum().item() / 32
    if acc >= best_acc:
        state = {"net": net.state_dict(), "acc": acc, "epoch": epoch}
        torch.save(state, "./ckpt.pth")
        best_acc = acc


for epoch in range(start_epoch, 5):
    train(epoch)
    test(epoch)
    scheduler.step()
    KILL
torch.save(net.state_dict(), "end.pt")
"""

# functions of another file save and load; the best result is compared after the save
UTILS = """\
import os
import shutil

import torch


def save_checkpoint(model, optimizer, epoch, path, is_best=False):
    torch.save({
        "epoch": epoch + 1,
        "state_dict": model.state_dict(),
        "optim_dict": optimizer.state_dict(),
    }, path)
    if is_best:
        shutil.copyfile(path, "best.pth")


def load_checkpoint(path, model, optimizer=None):
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["state_dict"])
    if optimizer:
        optimizer.load_state_dict(checkpoint["optim_dict"])
    return checkpoint
"""
HELPERS = """
from utils import load_checkpoint, save_checkpoint


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--patience", type=int, default=4)
    parser.add_argument("--resume", default=None)
    args = parser.parse_args()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    loader = DataLoader(trainset, batch_size=16, shuffle=True)
    if args.resume is not None:
        load_checkpoint(args.resume, model, optimizer)
    best_loss = float("inf")
    bad = 0
    for epoch in range(args.epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        val_loss = nn.functional.cross_entropy(model(X[64:]), Y[64:]).item()
        is_best = val_loss < best_loss
        save_checkpoint(model, optimizer, epoch, "last.pth", is_best)
        if is_best:
            best_loss = val_loss
            bad = 0
        else:
            bad += 1
        scheduler.step(val_loss)
        if bad > args.patience:
            break
        KILL
    torch.save(model.state_dict(), "end.pt")


if __name__ == "__main__":
    main()
"""

# methods of a class; the best result changes after the save
TRAINER = """

class Trainer:
    def __init__(self, args):
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[2, 4], gamma=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
        self.loader = DataLoader(trainset, batch_size=16, shuffle=True)
        self.start_epoch = 0
        self.best_acc = 0.0
        if args.resume:
            self.load_checkpoint(args.resume)

    def train_epoch(self, epoch):
        for x, y in self.loader:
            self.optimizer.zero_grad()
            self.scaler.scale(nn.functional.cross_entropy(self.model(x), y)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def save_checkpoint(self, epoch, path):
        state = {"epoch": epoch, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, path)

    def load_checkpoint(self, path):
        state = torch.load(path, map_location="cpu")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.start_epoch = state["epoch"]

    def fit(self):
        for epoch in range(self.start_epoch, 5):
            self.train_epoch(epoch)
            acc = (self.model(X[64:]).argmax(1) == Y[64:]).float().mean().item()
            if acc > self.best_acc:
                self.best_acc = acc
                torch.save(self.model.state_dict(), "best.pth")
            self.save_checkpoint(epoch, "last.pth")
            self.scheduler.step()
            KILL


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="")
    trainer = Trainer(parser.parse_args())
    trainer.fit()
    torch.save(trainer.model.state_dict(), "end.pt")
"""

# name -> (the files, the options of a restart, the rules of the repairs)
SCRIPTS = {
    "module": ({"train.py": MODULE}, "--resume", {"R101", "R103", "R301", "R501"}),
    "helpers": (
        {"train.py": HELPERS, "utils.py": UTILS},
        "--resume last.pth",
        {"R103", "R107", "R108", "R302", "R501"},
    ),
    "trainer": ({"train.py": TRAINER}, "--resume last.pth", {"R103", "R104", "R108", "R301", "R401", "R501"}),
}


def write(folder, texts):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


# one of them in each run of the tests
@pytest.mark.parametrize(
    "name", ["helpers", *[pytest.param(name, marks=pytest.mark.thorough) for name in ("module", "trainer")]]
)
def test_a_typical_script_continues_exactly(name, tmp_path):
    texts, resume, rules = SCRIPTS[name]
    for file, text in texts.items():
        place = text.find("KILL")
        indent = " " * (place - text.rfind("\n", 0, place) - 1)
        texts = texts | {
            file: (HEAD if file == "train.py" else "") + text.replace("KILL", KILL.format(indent))
        }
    old = write(tmp_path / "old", texts)
    result = repair(str(old / "train.py"))
    assert rules <= {finding.rule for finding, _ in result.repaired}
    assert [finding for finding, _ in result.left if not finding.is_hint] == []
    news = texts | {file: result.new[str(old / file)].decode() for file in texts}
    folders = {kind: write(tmp_path / kind, news) for kind in ("whole", "killed")}
    before = write(tmp_path / "before", texts)
    again = resume.split()
    assert run_all([
        [describe(old, "train.py"), describe(folders["whole"], "train.py")],
        [describe(folders["killed"], "train.py", KILL="1"), describe(before, "train.py", KILL="1")],
        [describe(folders["killed"], "train.py", *again, KILL="2")],
        [describe(folders["killed"], "train.py", *again)],
    ]) == [[0, 0], [9, 9], [9], [0]]  # fmt: skip
    ends = {kind: torch.load(folder / "end.pt") for kind, folder in folders.items()}
    assert is_equal(ends["whole"], torch.load(old / "end.pt")), (
        "a repair changes a run without an interruption"
    )
    assert is_equal(ends["whole"], ends["killed"])
    best = [folder / "best.pth" for folder in folders.values() if (folder / "best.pth").exists()]
    assert not best or len(best) == 2
    # an old checkpoint is loaded, and the entries that it lacks are named
    write(before, news)
    assert run_all([[describe(before, "train.py", *again, log="later.txt")]]) == [[0]]
    assert "warning: this checkpoint has no" in (before / "later.txt").read_text()
