"""Scripts that cannot continue at all: one hint says what each lacks, and the way."""

import pytest

from bootfile.lint.cli import as_text
from bootfile.lint.engine import lint_all

SCRIPT = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
{top}
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 4)), 8, shuffle=True)
{before}
for epoch in range({epochs}):
    for inputs, targets in loader:
        optimizer.zero_grad()
        (model(inputs) - targets).pow(2).sum().backward()
        optimizer.step()
    {save}
{after}
"""
PARTS = {"top": "", "before": "", "epochs": "10", "save": "pass", "after": ""}
WEIGHTS = 'torch.save(model.state_dict(), "last.pt")'
FULL = 'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")'
EXACT = "bootfile fix --exact script.py"
GUIDE = "the seven lines of guides/own_loop.md"
UNVERIFIED = ', and prove ends at best with "unverified"'


def write(**parts):
    return SCRIPT.format(**{**PARTS, **parts})


def find(text, folder, monkeypatch, name="script.py"):
    """Return the lines of the rule in a report."""
    compile(text, name, "exec")
    monkeypatch.chdir(folder)
    (folder / name).write_text(text, encoding="utf-8")
    findings, errors, _ = lint_all([name])
    assert not errors
    return [line for line in as_text(findings) if " R703 " in line]


LACKS = {
    "nothing": (
        {},
        "nothing is saved: a kill loses the whole run, and prove has no file to compare",
    ),
    "figures only": (
        {"save": 'torch.utils.tensorboard.SummaryWriter("log").add_scalar("epoch", epoch)'},
        "nothing is saved: a kill loses the whole run, and prove has no file to compare",
    ),
    "weights": (
        {"save": WEIGHTS},
        f"only weights are saved: a restart begins with a new optimizer{UNVERIFIED}",
    ),
    "weights of a library": (
        {"save": 'model.save_pretrained("out")'},
        f"only weights are saved: a restart begins with a new optimizer{UNVERIFIED}",
    ),
    "weights that are loaded": (
        {"save": WEIGHTS, "before": "if sys.argv[1:]:\n    model.load_state_dict(torch.load(sys.argv[1]))"},
        "only weights are saved: a restart begins with a new optimizer",
    ),
    "weights after the training": (
        {"after": WEIGHTS},
        f"only weights are saved, after the last epoch: a kill loses the whole run{UNVERIFIED}",
    ),
    "a state that nothing loads": (
        {"save": FULL},
        f"the checkpoint has the optimizer, but the script never loads it{UNVERIFIED}",
    ),
}


@pytest.mark.parametrize("name", LACKS)
def test_one_hint_says_what_the_script_lacks(name, tmp_path, monkeypatch):
    parts, text = LACKS[name]
    [line] = find(write(**parts), tmp_path, monkeypatch)
    assert line.partition(" R703 hint: ")[2] == f"{text}; fix: {EXACT}"


def test_the_way_is_a_page_if_the_loop_has_another_form(tmp_path, monkeypatch):
    text = write().replace("in loader:", "in [next(iter(loader))] * 8:")
    [line] = find(text, tmp_path, monkeypatch)
    assert line.endswith(f"; fix: {GUIDE}")
    [line] = find(write(top="import accelerate"), tmp_path, monkeypatch)
    assert line.endswith("; fix: its own checkpoints (guides/trainers.md)")


SILENT = {
    "it continues": {"save": FULL, "before": 'optimizer.load_state_dict(torch.load("last.pt")["optimizer"])'},
    "a saver that is not known": {"top": "from library import save_all", "save": "save_all(model)"},
    "a saver that is an object": {
        "top": "from library import Checkpointer\nsaver = Checkpointer()",
        "save": "saver.save(epoch)",
    },
    "distributed checkpoints": {
        "top": "import torch.distributed.checkpoint as dcp",
        "save": 'dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id="out")',
    },
    "accelerate": {
        "top": "from accelerate import Accelerator\naccelerator = Accelerator()",
        "save": 'accelerator.save_state("out")',
    },
    "Ray": {
        "top": "from ray import train",
        "save": 'train.report({}, checkpoint=train.Checkpoint.from_directory("out"))',
    },
    "a trainer": {"top": "from transformers import Trainer\ntrainer = Trainer()"},
    "one epoch": {"epochs": "1", "after": WEIGHTS},
}


@pytest.mark.parametrize("name", SILENT)
def test_a_script_that_may_continue_gets_no_hint(name, tmp_path, monkeypatch):
    assert find(write(**SILENT[name]), tmp_path, monkeypatch) == []


@pytest.mark.parametrize(
    "text",
    [
        # an image that is changed in few steps, an evaluation, and one pass
        "for step in range(300):\n    model(data).sum().backward()\n    optimizer.step()",
        "for epoch in range(3):\n    for batch in data:\n        model(batch)",
        "for batch in data:\n    model(batch).sum().backward()\n    optimizer.step()",
    ],
)
def test_a_short_loop_gets_no_hint(text, tmp_path, monkeypatch):
    head = "import torch\ndata = torch.randn(8, 4)\nmodel = torch.nn.Linear(4, 4)\n"
    text = f"{head}optimizer = torch.optim.Adam(model.parameters())\n{text}\n"
    assert find(text, tmp_path, monkeypatch) == []


def test_a_module_leaves_the_saving_to_its_script(tmp_path, monkeypatch):
    function = (
        "def train(model, loader, optimizer):\n    for epoch in range(10):\n        for batch in loader:\n"
        "            model(batch).sum().backward()\n            optimizer.step()\n"
    )
    assert find(function, tmp_path, monkeypatch, "module.py") == []
    script = "import torch\nfrom module import train\nmodel = torch.nn.Linear(4, 4)\n"
    script += "train(model, torch.randn(8, 4), torch.optim.Adam(model.parameters()))\n"
    [line] = find(script, tmp_path, monkeypatch)
    assert line.startswith("module.py:2: R703 hint: nothing is saved")
    assert find(write(), tmp_path, monkeypatch, "test_script.py") == []
