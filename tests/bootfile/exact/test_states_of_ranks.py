"""A state that differs between the ranks is one warning at a save: a checkpoint holds that of rank 0."""

import re

import pytest
import torch

from tests.conftest import ROOT, run_ranks

LOOP = """
import copy
import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, sys.argv[2])
from bootfile import Exact, torch_loader


class Mean:
    def __init__(self):
        self.values = {"mean": 0.0, "losses": [], "names": {"loss", "step"}, "sum": torch.zeros(3)}

    def add(self, loss):
        self.values["mean"] = 0.9 * self.values["mean"] + 0.1 * loss
        self.values["losses"].append(loss)
        self.values["sum"] += loss

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = state


class Average:  # of a model, with the statistics of its BatchNorm
    def __init__(self, model):
        self.shadow = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def update(self, model):
        for name, tensor in model.state_dict().items():
            self.shadow[name] = torch.lerp(self.shadow[name].double(), tensor.double(), 0.1)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]


class Name(Mean):
    def state_dict(self):
        return {"name": f"rank {rank}"}


torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
loader = torch_loader(DataLoader(data, 8, sampler=DistributedSampler(data)), torch.device("cpu"), epochs=2)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
forward = DistributedDataParallel(model, broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
local, common, name, average = Mean(), Mean(), Name(), Average(model)
run = Exact(
    sys.argv[1], loader, model=model, forward=forward, optimizer=optimizer, scheduler=schedule, scaler=scaler,
    common=common, average=average, save_every=4,
)
if "local" in sys.argv:
    run.add(local=local)
if "name" in sys.argv:
    run.add(name=name)
for _ in loader.epochs_from(run.resume()):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(forward(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if run.accepts(loss):
            scaler.step(optimizer)
        scaler.update()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        schedule.step(mean.item())
        average.update(model)
        common.add(mean.item())
        local.add(loss.item())
        saves = run.end_step().save
        if saves and "late" in sys.argv:
            local.values = copy.deepcopy(common.values)  # it is equal when it is saved
        if saves:
            run.save()
run.close()
torch.distributed.destroy_process_group()
"""


@pytest.mark.skipif(torch.__version__ < "2.3", reason="torch.amp.GradScaler came with torch 2.3")
@pytest.mark.parametrize(
    "words, names",
    [((), []), (("local",), ["local"]), (("name", "local"), ["local", "name"]), (("local", "late"), [])],
)
def test_a_state_that_differs_between_ranks_is_named_once(words, names, tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    results = run_ranks(script, tmp_path / "out", ROOT, *words)
    printed = "".join(result.stdout for result in results)
    warnings = re.findall(r"^warning: .*", printed, re.MULTILINE)
    assert len(warnings) == len(names)
    for name, warning in zip(names, warnings, strict=True):
        assert re.match(rf"warning: {name} of rank 1 .*rank 0 .*step 4: .*checkpoint .*rank 0\b", warning)
    assert not any("Traceback" in result.stderr for result in results)
