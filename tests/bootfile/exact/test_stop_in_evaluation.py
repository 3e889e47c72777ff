"""A stop or an error in an evaluation saves nothing in the middle of it: the model may hold other weights,
and what the loop does after the evaluation is a part of the step."""

import os
import signal

import pytest
import torch

from bootfile.histories import read_states
from tests.conftest import ROOT, finish, run, start

LOOP = """
import os, signal, sys, time, torch
sys.path.insert(0, ROOT)
from torch.utils.data import DataLoader, Dataset, TensorDataset
from bootfile import BatchSampler, Exact, map_style_loader, torch_loader

how, kind, place = sys.argv[1:]
device = torch.device("cpu")
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator))

class Slow(Dataset):
    step = 0
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if self.step == 8 and index == 3:
            if how == "term":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(4)  # a thread that saves would begin after 2
            if how == "error":
                raise OSError(5, "Input/output error")
        return data[index]

def make(dataset, size, epochs):
    if kind == "map_style":
        sampler = BatchSampler(len(dataset), size, seed=0, epochs=epochs)
        return map_style_loader(dataset, sampler, device)
    return torch_loader(DataLoader(dataset, size, shuffle=dataset is data), device, epochs=epochs)

torch.manual_seed(0)
loader = make(data, 16, 4)  # 4 steps an epoch
slow = Slow()
held_out = DataLoader(slow, 2) if kind == "plain" else make(slow, 2, 100)
model = torch.nn.Linear(8, 1)
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
parts = {"model": model, "optimizer": optimizer, "average": average, "scheduler": scheduler}
run = Exact("OUT", loader, **parts, save_every=7)  # no evaluation follows this save

def evaluate():
    slow.step = loader.step
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), average.module.parameters()):
            parameter.copy_(other)
        losses = [torch.nn.functional.mse_loss(model(x), y).item() for x, y in held_out]
        for parameter, value in zip(model.parameters(), kept):
            parameter.copy_(value)
    scheduler.step(sum(losses))

for epoch in loader.epochs_from(run.resume()):
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        average.update_parameters(model)
        if place == "step" and loader.step % 2 == 0:
            evaluate()
        if run.end_step().save:
            run.save()
        if place == "after" and loader.step % 2 == 0:
            evaluate()
    if place == "epoch":
        evaluate()
run.close()
"""


@pytest.mark.parametrize(
    "how, kind, place",
    [
        ("term", "torch", "after"),
        ("error", "map_style", "after"),
        *(
            pytest.param(how, kind, place, marks=pytest.mark.thorough)
            for how in ("term", "error")
            for kind in ("torch", "map_style", "plain")
            for place in ("step", "after", "epoch")
            if (how, kind, place) not in (("term", "torch", "after"), ("error", "map_style", "after"))
        ),
    ],
)
def test_a_restart_equals_the_whole_run(tmp_path, how, kind, place):
    loop = tmp_path / "loop.py"
    loop.write_text(LOOP.replace("ROOT", repr(str(ROOT))))
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder in (whole, stopped):
        folder.mkdir()
    run(loop, "none", kind, place, cwd=whole)
    code = {"term": 128 + signal.SIGTERM, "error": 1}[how]
    result = finish(start(loop, how, kind, place, cwd=stopped), code)
    assert "save()" not in result.stderr  # only what happened is an error
    for path in (stopped / "OUT" / "checkpoints").glob("*.pt"):
        objects = torch.load(path, weights_only=True)["objects"]
        averaged = objects["average"]["module.weight"]
        assert not torch.equal(objects["model"]["weight"], averaged), os.path.basename(path)
    run(loop, "none", kind, place, cwd=stopped)
    last = [read_states(str(folder / "OUT"))[16]["digest"] for folder in (whole, stopped)]
    assert last[0] == last[1]
