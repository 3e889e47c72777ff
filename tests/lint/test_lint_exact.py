"""Loops with bootfile.Exact: lint finds what the loop changes and Exact does not get."""

import os
import re
import textwrap

import pytest

from bootfile.lint import cli
from bootfile.lint.engine import lint

LOOP = """import sys
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset
from bootfile import Exact, torch_loader

{top}
loader = torch_loader(DataLoader(TensorDataset(torch.ones(64, 4)), 8), torch.device("cpu"), epochs=3)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
{setup}
run = Exact(sys.argv[1], loader, model=model, optimizer=optimizer{given})
{before}
for epoch in loader.epochs_from(run.resume()):
    for (inputs,) in loader:
        optimizer.zero_grad()
        loss = model(inputs).sum()
        loss.backward()
        {step}
        if run.end_step().save:
            run.save()
    {end}
run.close()
torch.save({{"model": model.state_dict(){last}}}, "last.pt")
"""
PARTS = {"top": "", "setup": "", "given": "", "before": "", "step": "", "end": "pass", "last": ""}
COSINE = "other = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)"
# rule -> (how the object is made, how the loop changes it)
CHANGED = {
    "R101": ("other = torch.optim.Adam(model.parameters())", "optimizer.step(); other.step()"),
    "R103": (COSINE, "optimizer.step(); other.step()"),
    "R104": (
        "other = torch.amp.GradScaler()",
        "other.scale(loss).backward(); other.step(optimizer); other.update()",
    ),
    "R105": ("other = AveragedModel(model)", "optimizer.step(); other.update_parameters(model)"),
}
KEEPER = """class Keeper:
    def __init__(self, part):
        self.part = part
    def state_dict(self):
        return {"part": self.part.state_dict()}
    def load_state_dict(self, state):
        self.part.load_state_dict(state["part"])
"""
SEARCH = COSINE + "\nfor (inputs,) in loader:\n    model(inputs).sum().backward()\n    optimizer.step()\n    "
SEARCH += "other.step()"
GIVEN = {
    "a keyword": {"given": ", other=other"},
    "the keyword of a schedule": {"given": ", scheduler=other"},
    "add": {"before": "run.add(other=other)"},
    "objects by name": {"given": ", **objects", "top": "objects = load_objects()"},
    "a known dict": {"given": ', **{"other": other}'},
    "objects of a loop": {
        "before": 'run.add(**{f"other{number}": part for number, part in enumerate([other])})'
    },
    "an object that has it": {"top": KEEPER, "before": "run.add(kept=Keeper(other))"},
}
CORRECT = {
    "only the optimizer": {},
    "a schedule that gets the epoch": {"setup": COSINE, "end": "other.step(epoch)"},
    "a schedule that gets the step": {
        "setup": "import timm\nother = timm.scheduler.CosineLRScheduler(optimizer, t_initial=24)",
        "step": "optimizer.step(); other.step_update(num_updates=loader.step)",
    },
    "a schedule in another one": {
        "setup": f"{COSINE}\nboth = torch.optim.lr_scheduler.SequentialLR(optimizer, [other], [])",
        "given": ", scheduler=both",
        "end": "other.step()",
    },
    "a schedule that reads the step": {
        "setup": "other = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 / (1 + loader.step))",
        "end": "other.step()",
    },
    "a scaler that is off": {
        "setup": "other = torch.amp.GradScaler(enabled=False)",
        "step": CHANGED["R104"][1],
    },
    "a search for the learning rate": {"setup": SEARCH},
    "an optimizer of each epoch": {"end": "inner = torch.optim.Adam(model.parameters()); inner.step()"},
    "a state that the script keeps": {
        "setup": COSINE,
        "before": 'if sys.argv[2:]:\n    other.load_state_dict(torch.load("schedule.pt"))',
        "end": 'other.step(); torch.save({"other": other.state_dict()}, "schedule.pt")',
    },
}


def write(**parts):
    return LOOP.format(**{**PARTS, "step": "optimizer.step()", **parts})


def find(text, folder):
    (folder / "script.py").write_text(text, encoding="utf-8")
    compile(text, "script.py", "exec")
    return [finding for finding in lint(str(folder / "script.py")) if not finding.is_hint]


@pytest.mark.parametrize("rule", CHANGED)
def test_a_state_that_exact_does_not_get_is_found(rule, tmp_path):
    setup, step = CHANGED[rule]
    # the file after the last epoch does not help a restart
    text = write(setup=setup, step=step, last=', "other": other.state_dict()')
    [finding] = find(text, tmp_path)
    assert finding.rule == rule
    assert finding.line == 1 + text.splitlines().index(f"        {step}")
    lines = list(cli.as_text([finding]))
    assert any("run.add() before run.resume()" in line for line in lines)
    # the same command continues such a loop: it has no option for it
    command = 'bootfile prove script.py --compare "FILES" --resume_with "" -- OUT'
    assert command.replace("script.py", os.path.relpath(tmp_path / "script.py")) in lines[-1]


@pytest.mark.parametrize("rule", CHANGED)
@pytest.mark.parametrize("name", GIVEN)
def test_a_state_that_exact_gets_is_not_found(name, rule, tmp_path):
    setup, step = CHANGED[rule]
    assert find(write(setup=setup, step=step, **GIVEN[name]), tmp_path) == []


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_loop_has_no_finding(name, tmp_path):
    assert find(write(**CORRECT[name]), tmp_path) == []


def test_a_loop_in_functions_is_followed(tmp_path):
    setup, step = CHANGED["R103"]
    head, _, body = write(setup=setup, step=step).partition("loader = ")
    body = textwrap.indent(f"loader = {body}", "    ")
    called = f'{head}def main():\n{body}\n\nif __name__ == "__main__":\n    main()\n'
    assert [finding.rule for finding in find(called, tmp_path)] == ["R103"]
    body = textwrap.indent(re.sub(r"\brun\b", "self.run", body), "    ")
    of_object = f"{head}class Trainer:\n    def train(self):\n{body}\nTrainer().train()\n"
    assert [finding.rule for finding in find(of_object, tmp_path)] == ["R103"]
    given = of_object.replace("optimizer=optimizer)", "optimizer=optimizer, scheduler=other)")
    assert find(given, tmp_path) == []
