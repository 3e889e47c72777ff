"""Scripts that are trained, killed after an epoch and started again: a repair makes the restart exact, and
does not change a run without an interruption."""

from textwrap import indent

import pytest
import torch

from bootfile.fix.engine import repair
from tests.conftest import cases, environment, run
from tests.fix.loops import is_equal

SCRIPT = """
import copy
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(3)
data = TensorDataset(torch.rand(24, 4))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(data, 4)
{setup}
start = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = {next}
{before}
for epoch in range({range}):
    for (batch,) in loader:
        {batch}
        loss = (model(batch) - 1).pow(2).mean()
        optimizer.zero_grad()
        {train}
        {step}
    {end}
    state = {{
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),  # and its momentum
        "epoch": epoch{save}
    }}
    torch.save(state, "new.pt")
    os.replace("new.pt", "last.pt")
    if epoch == int(os.environ.get("KILL_AFTER", 9)):
        os.kill(os.getpid(), 9)
torch.save([*model.parameters(), {result}], "end.pt")
"""
TRAIN = "loss.backward(); optimizer.step()"
PARTS = {
    "setup": "", "next": 'saved["epoch"] + 1', "before": "", "range": "start, 4", "batch": "pass",
    "train": TRAIN, "step": "pass", "end": "pass", "save": "", "result": "",
}  # fmt: skip
SCHEDULER = "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)"
AHEAD = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5, last_epoch=last)"
SAMPLED = "sampler = DistributedSampler(data, 1, 0)\nloader = DataLoader(data, 4, sampler=sampler)"
STEPPED = "steps += 1\nfor group in optimizer.param_groups:\n    group['lr'] = 0.1 * min(1, steps / 20)"
# the loss rises: the first epoch is the best one
RISING = "optimizer = torch.optim.SGD(model.parameters(), lr=0.001, maximize=True)\nbest = 9.0"
BEST = 'if loss < best:\n    best = loss\n    torch.save(model.state_dict(), "best.pt")'
AVERAGED = "for a, b in zip(average.parameters(), model.parameters()):\n    a.data.lerp_(b.data, 0.1)"

CLONES = "{name: part.detach().clone() for name, part in model.named_parameters()}"
SHADOWED = "for name, part in model.named_parameters():\n    {}[name].mul_(0.9).add_(part.data, alpha=0.1)"
# loops over steps: they save before they train, or within an epoch
STEPS = """
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
loader = DataLoader(TensorDataset(torch.rand(24, 4)), 4, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
step, start = 0, 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
    {start}


def train(batch):
    loss = (model(batch) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


{loop}
torch.save([*model.parameters()], "end.pt")
"""
SAVE = """{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "epoch": epoch}
torch.save(state, "new.pt")
os.replace("new.pt", "last.pt")"""
KILL = 'if step == int(os.environ.get("KILL_AFTER", 99)):\n    os.kill(os.getpid(), 9)'
EARLY = f"""epoch = 0
while step < 12:
    if step % 3 == 0:
        print(model(torch.randn(4, 4)).mean().item())
        state = {indent(SAVE, " " * 8).lstrip()}
    train(torch.randn(8, 4))
    step += 1
{indent(KILL, " " * 4)}"""
WITHIN = f"""for epoch in range(start, 3):
    for (batch,) in loader:
        train(batch)
        step += 1
        if step % 4 == 0:
            state = {indent(SAVE, " " * 12).lstrip()}
{indent(KILL, " " * 8)}"""

# what a restart does wrong -> (the rule, the parts of the script)
KINDS = {
    "optimizer": ("R101", {
        "setup": "optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)\n"
        "second = torch.optim.Adam(model[2].parameters())", "step": "second.step(); second.zero_grad()"}),
    "scheduler": ("R103", {"setup": SCHEDULER, "end": "scheduler.step()"}),
    "scheduler that is made later": ("R103", {"before": SCHEDULER, "end": "scheduler.step()"}),
    "scheduler that may be None": ("R103", {
        "setup": "scheduler = None\nif len(data) > 3:\n    " + SCHEDULER,
        "end": "if scheduler is not None:\n    scheduler.step()"}),
    "scheduler that is not loaded": ("R201", {
        "setup": SCHEDULER, "end": "scheduler.step()", "save": ', "scheduler": scheduler.state_dict()'}),
    "scaler": ("R104", {
        "setup": 'scaler = torch.amp.GradScaler("cpu", init_scale=16, growth_interval=2)',
        "train": "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()",
        "result": "torch.tensor(scaler.get_scale())"}),
    "average": ("R105", {
        "setup": "average = copy.deepcopy(model)", "step": AVERAGED, "result": "*average.parameters()"}),
    "averages in a dict": ("R105", {
        "setup": f"average = {CLONES}", "step": SHADOWED.format("average"), "result": "*average.values()"}),
    "averages in an object": ("R105", {
        "setup": f"class Shadow:\n    pass\nshadow = Shadow()\nshadow.kept = {CLONES}",
        "step": SHADOWED.format("shadow.kept"), "result": "*shadow.kept.values()"}),
    "averages in a model of an object": ("R105", {
        "setup": "class Shadow:\n    def __init__(self):\n        self.module = copy.deepcopy(model)\n"
        "    def update(self):\n"
        "        pairs = zip(self.module.parameters(), model.parameters())\n"
        "        for a, b in pairs:\n            a.data.lerp_(b.data, 0.1)\nema = Shadow()",
        "step": "ema.update()", "result": "*ema.module.parameters()"}),
    "target": ("R105", {
        "setup": "target = copy.deepcopy(model)", "result": "*target.parameters()",
        "batch": "if epoch % 4 == 1:\n    target.load_state_dict(model.state_dict())"}),
    "best and bad": ("R108", {
        "setup": RISING.replace("best =", "best, bad =").replace("9.0", "None, 0"),
        "end": BEST.replace("loss < best", "best is None or loss < best").replace(
            "best = loss\n", "best, bad = loss, 0\n") + "\nelse:\n    bad += 1"}),
    "generator": ("R106", {
        "setup": "g = torch.Generator().manual_seed(1)",
        "batch": "batch = batch + torch.rand(batch.shape, generator=g)"}),
    "order by a generator": ("R106", {
        "setup": "g = torch.Generator().manual_seed(1)\n"
        "loader = DataLoader(data, 4, shuffle=True, generator=g)"}),
    "counter": ("R107", {"setup": "steps = 0", "step": STEPPED}),
    "best": ("R108", {"setup": RISING, "end": BEST}),
    "best that is set later": ("R108", {
        "setup": RISING.partition("\n")[0], "before": "best = 9.0", "end": BEST}),
    "criterion": ("R109", {
        "setup": "head = nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)",
        "batch": "batch = head(batch)", "result": "*head.parameters()"}),
    "epoch again": ("R301", {"next": 'saved["epoch"]'}),
    "epoch left out": ("R301", {"next": 'saved["epoch"] + 2'}),
    "first epoch": ("R302", {"range": "4", "next": "0"}),
    "schedule that its constructor steps": ("R103", {
        "setup": "last = -1", "next": 'saved["epoch"] + 1; last = saved["epoch"] + 1',
        "before": AHEAD, "end": "scheduler.step()"}),
    "counter that is not loaded": ("R201", {
        "setup": "steps = 0", "step": STEPPED, "save": ', "steps": steps'}),
    "best that begins with the last": ("R108", {
        "setup": RISING, "before": "if start:\n    best = saved['loss']", "save": ', "loss": loss',
        "end": "loss = loss.item() + (0, 9, 5, 6)[epoch]\n" + BEST}),
    "load after the training": ("R201", {
        "setup": SCHEDULER, "end": "scheduler.step()", "save": ', "scheduler": scheduler.state_dict()'}),
    "order": ("R401", {"setup": "loader = DataLoader(data, 4, shuffle=True)"}),
}  # fmt: skip


# one of each rule in each run of the tests
SECOND = (
    "scheduler that is made later", "scheduler that may be None", "schedule that its constructor steps",
    "counter that is not loaded", "load after the training", "order by a generator", "best that is set later",
    "best that begins with the last", "epoch left out",
)  # fmt: skip


def write(parts):
    text = SCRIPT
    values = PARTS | parts
    for name, part in values.items():
        place = next(line for line in SCRIPT.splitlines() if "{" + name + "}" in line)
        values[name] = part.replace("\n", "\n" + " " * (len(place) - len(place.lstrip())))
    return text.format(**values)


def train(folder, text, kills=()):
    """Train in a new folder, with kills after epochs, and return the numbers at the end."""
    folder.mkdir()
    (folder / "train.py").write_text(text)
    for epoch in kills:
        run("train.py", cwd=folder, env=environment(KILL_AFTER=str(epoch)), code=-9)
    run("train.py", cwd=folder)
    best = folder / "best.pt"
    return [*torch.load(folder / "end.pt"), *(torch.load(best).values() if best.exists() else ())]


def patch(text, folder, rule):
    path = folder / "script.py"
    path.write_text(text)
    result = repair(str(path), [rule])
    assert [finding.rule for finding, _ in result.repaired] == [rule] and result.left == []
    return result.new[str(path)].decode()


@pytest.mark.parametrize("kind", cases(KINDS, *SECOND))
def test_a_restart_is_exact_after_the_repair(kind, tmp_path):
    rule, parts = KINDS[kind]
    old = write(parts)
    new = patch(old, tmp_path, rule)
    whole = train(tmp_path / "whole", new)
    assert is_equal(whole, train(tmp_path / "old", old)), "the repair changes a run without an interruption"
    assert not is_equal(whole, train(tmp_path / "killed_old", old, [1]))
    assert is_equal(whole, train(tmp_path / "killed", new, [1, 2]))


@pytest.mark.parametrize(
    ("rule", "loop", "start"), [("R401", EARLY, "pass"), ("R303", WITHIN, 'start = saved["epoch"] + 1')]
)
def test_a_loop_over_steps_is_exact_after_the_repair(rule, loop, start, tmp_path):
    old = STEPS.replace("{start}", start).replace("{loop}", loop)
    new = patch(old, tmp_path, rule)
    whole = train(tmp_path / "whole", new)
    assert is_equal(whole, train(tmp_path / "old", old))
    assert not is_equal(whole, train(tmp_path / "killed_old", old, [5]))
    assert is_equal(whole, train(tmp_path / "killed", new, [5, 9]))


def test_an_order_that_changes_on_purpose(tmp_path):
    """R307: each epoch gets its order, and a restart has the same ones."""
    new = patch(write({"setup": SAMPLED}), tmp_path, "R307")
    whole = train(tmp_path / "whole", new)
    assert not is_equal(whole, train(tmp_path / "old", write({"setup": SAMPLED})))
    assert is_equal(whole, train(tmp_path / "killed", new, [0, 2]))


def test_sigterm_saves_the_epoch(tmp_path):
    """R801: the epoch in which the signal comes is trained to its end, and the restart is exact."""
    text = write({"batch": "if epoch == 1: os.system(os.environ.get('SEND', 'true'))"})
    new = patch(text, tmp_path, "R801")
    whole = train(tmp_path / "whole", new)
    assert is_equal(whole, train(tmp_path / "old", text))
    folder = tmp_path / "ended"
    folder.mkdir()
    (folder / "train.py").write_text(new)
    run("train.py", cwd=folder, env=environment(SEND="kill -TERM $PPID"), code=143)
    assert torch.load(folder / "last.pt")["epoch"] == 1
    run("train.py", cwd=folder)
    assert is_equal(whole, torch.load(folder / "end.pt"))
