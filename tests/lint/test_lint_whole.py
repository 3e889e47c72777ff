"""Whole scripts of usual forms: a bug that decides the flow, and the same script without it."""

import textwrap

import pytest

from bootfile.lint.engine import lint

TRAIN = """
import argparse, math, os, random
import numpy as np
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--resume", default="")
parser.add_argument("--first", type=int, default=0)
args = parser.parse_args()
{top}
model = nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
loader = torch.utils.data.DataLoader(torch.zeros(9, 4), {options})
first, step, best = 0, 0, math.inf
{setup}
if args.resume:
    saved = torch.load(args.resume)
    model.load_state_dict(saved["model"])
    {load}
{before}
{loop}:
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        {batch}
    {end}
{after}
"""
DEFAULT = {
    "top": "", "options": "shuffle=True", "setup": "", "before": "", "batch": "pass", "after": "",
    "load": "optimizer.load_state_dict(saved['optimizer']); first = saved['epoch']",
    "loop": "for epoch in range(first, 9)", "end": "pass",
}  # fmt: skip
STATE = "'model': model.state_dict(), 'optimizer': optimizer.state_dict()"
SAVE = f"torch.save({{{STATE}, 'epoch': epoch + 1}}, f'out/{{epoch}}.pt')"
FOLDS = {
    "loop": "for fold in range(3):\n  model = nn.Linear(4, 4)\n"
            "  optimizer = torch.optim.Adam(model.parameters())\n"
            "  scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)\n"
            "  saved = torch.load(args.resume)\n  model.load_state_dict(saved['model'])\n"
            "  optimizer.load_state_dict(saved['optimizer'])\n"
            "  for epoch in range(saved['epoch'], 9)",
}  # fmt: skip
SCHEDULED = "'scheduler': scheduler.state_dict(), 'epoch'"
AFTER = f"torch.save({{{STATE}}}, 'out/last.pt')"
LAST = "loss = loss.item()\n    if loss < best:\n        best = loss\n    "
LISTED = """class Images:
    def __init__(self):
        self.found, self.images = [], [1]
        for name in os.listdir('.'):
            self.found.append(name)
    def __len__(self):
        return 9
    def __getitem__(self, number):
        return self.{}[number]
loader = Images()
"""
MADE = "torch.optim.lr_scheduler.StepLR(optimizer, 3, last_epoch={})"
CONFIG = "class Config:\n    def __init__(self):\n        self.amp = False\nconfig = Config()"
TWO = "def save_one(name, part):\n    torch.save(part.state_dict(), f'out/{name}.pt')\n"
# rule, parts with the bug, parts without it
FORMS = {
    "a loop over folds that makes the model is not the one that trains":
        ("R103", FOLDS | {"end": f"scheduler.step(); {SAVE}"},
         FOLDS | {"end": "scheduler.step(); " + SAVE.replace("'epoch'", SCHEDULED)}),
    "the first epoch is an option of any name, and only weights are saved":
        ("R101", {"load": "pass", "loop": "for epoch in range(args.first, 9)",
                  "end": "torch.save({'model': model.state_dict()}, f'{epoch}.pt')"}, None),
    "a checkpoint within a pass of `while True`":
        ("R303", {"loop": "while True", "load": "optimizer.load_state_dict(saved['optimizer']); "
                  "step = saved['epoch']",
                  "batch": "step += 1\n        if loss > 1e8:\n            raise RuntimeError\n        "
                           + SAVE.replace("epoch + 1", "step").replace("{epoch}", "{step}")}, None),
    "a loop that begins again, with the save after it":
        ("R302", {"load": "optimizer.load_state_dict(saved['optimizer'])", "loop": "for epoch in range(9)",
                  "after": AFTER}, {"after": AFTER}),
    "a best result that begins with the last one":
        ("R108", {"before": "if args.resume:\n    best = saved['loss']\n",
                  "end": LAST + SAVE.replace("'epoch'", "'loss': loss, 'epoch'")},
         {"before": "if args.resume:\n    best = saved['loss']\n",
          "end": LAST + SAVE.replace("'epoch'", "'loss': best, 'epoch'")}),
    "an entry of the settings has the name of another one":
        ("R201", {"load": "first = saved['epoch']; print(saved['settings']['optimizer'])",
                  "end": SAVE.replace("'epoch'", "'settings': vars(args), 'epoch'")},
         {"load": "first = saved['epoch']; print(saved['optimizer'])",
          "end": SAVE.replace("'epoch'", "'settings': vars(args), 'epoch'")}),
    "a load after the training is not one of a restart":
        ("R201", {"load": "first = saved['epoch']", "end": SAVE,
                  "after": "saved = torch.load('out/8.pt')\nmodel.load_state_dict(saved['model'])\n"
                           "optimizer.load_state_dict(saved['optimizer'])"},
         {"end": SAVE, "after": "saved = torch.load('out/8.pt')\nmodel.load_state_dict(saved['model'])"}),
    "a second training loads after the first one":
        ("R201", {"load": "first = saved['epoch']", "end": SAVE, "after": "print('end')"},
         {"end": SAVE, "setup": "for batch in loader:\n    model(batch).mean().backward()\n    "
                                "optimizer.step()"}),
    "a counter that is saved, and not loaded":
        ("R201", {"batch": "step += 1", "end": SAVE.replace("'epoch'", "'step': step, 'epoch'")},
         {"load": DEFAULT["load"] + "; step = saved['step']", "batch": "step += 1",
          "end": SAVE.replace("'epoch'", "'step': step, 'epoch'")}),
    "a GradScaler that a setting turns on":
        ("R104", {"top": CONFIG,
                  "setup": "scaler = torch.amp.GradScaler(enabled=config.amp)", "end": SAVE,
                  "batch": "scaler.step(optimizer); scaler.update()"},
         {"setup": "scaler = torch.amp.GradScaler(enabled=False)", "end": SAVE,
          "batch": "scaler.step(optimizer); scaler.update()"}),
    "one helper writes the model and its optimizer":
        ("R508", {"top": TWO, "load": "optimizer.load_state_dict(torch.load('out/o.pt'))",
                  "end": "save_one('m', model); save_one('o', optimizer)"}, {"end": SAVE}),
    "the constructor of a schedule steps, too":
        ("R103", {"before": f"scheduler = {MADE.format('first')}", "end": f"scheduler.step(); {SAVE}"},
         {"before": f"scheduler = {MADE.format('first - 1')}", "end": f"scheduler.step(); {SAVE}"}),
    "the name of the file has the epoch that was trained":
        ("R301", {"load": "pass", "setup": "saved = torch.load(f'out/{args.first}.pt')\n"
                  "model.load_state_dict(saved['model'])", "loop": "for epoch in range(args.first, 9)",
                  "end": "torch.save({'model': model.state_dict()}, f'out/{epoch}.pt')"},
         {"load": "pass", "setup": "saved = torch.load(f'out/{args.first}.pt')\n"
          "model.load_state_dict(saved['model'])", "loop": "for epoch in range(args.first, 9)",
          "end": "torch.save({'model': model.state_dict()}, f'out/{epoch + 1}.pt')"}),
    "workers that draw with random, whose seeds come from torch":
        ("R401", {"top": "class Images:\n    def __len__(self):\n        return 9\n    def __getitem__(self, "
                         "number):\n        return torch.zeros(4) + random.random()\ntorch.manual_seed(1)",
                  "before": "loader = torch.utils.data.DataLoader(Images(), num_workers=2)", "end": SAVE},
         {"top": "class Images:\n    def __len__(self):\n        return 9\n    def __getitem__(self, "
                 "number):\n        return torch.zeros(4)\ntorch.manual_seed(1)",
          "before": "loader = torch.utils.data.DataLoader(Images(), num_workers=2)", "end": SAVE}),
    "an object of a class of the project":
        ("R506", {"top": "class Log:\n    def __init__(self):\n        self.rows = []\nlog = Log()",
                  "end": SAVE.replace("'epoch'", "'log': log, 'epoch'")}, {"end": SAVE}),
    "a folder is listed, and the samples come from somewhere else":
        ("R402", {"top": "torch.manual_seed(1)\n" + LISTED.format("found"), "end": SAVE},
         {"top": "torch.manual_seed(1)\n" + LISTED.format("images"), "end": SAVE}),
    "a test that ends the training decides about no file":
        ("R501", {"end": f"torch.save({{{STATE}}}, 'out/last.pt')"},
         {"end": f"torch.save({{{STATE}}}, 'out/size.pt')\n    os.remove('out/size.pt')"}),
}  # fmt: skip


def find(tmp_path, parts):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN).format(**DEFAULT | parts), encoding="utf-8")
    return {finding.rule for finding in lint(str(script))}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_found_and_its_correct_twin_is_not(tmp_path, name):
    rule, bad, good = FORMS[name]
    assert rule in find(tmp_path, bad)
    if good is not None:
        assert rule not in find(tmp_path, good)
