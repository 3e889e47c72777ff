"""The code of a loop after its batches runs once in each epoch, wherever the run is stopped and continued."""

import re
import signal

import pytest
import torch

from tests.conftest import run

SCRIPT = """
import errno, os, signal, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from bootfile import Exact, torch_loader

out, mode = sys.argv[1:]
torch.manual_seed(0)

class Data(Dataset):
    fails = False
    inputs = torch.randn(32, 4)
    def __len__(self):
        return 32
    def __getitem__(self, id):
        if self.fails and mode == "error":
            raise OSError(errno.ENOENT, "the file is lost")
        if self.fails and mode == "inner":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)  # a request to stop is served after 2 s, if the step may be saved
            self.fails = False
        elif self.fails:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)  # the handler ends it
        return self.inputs[id], self.inputs[id].sum()[None]

data = Data()
second = Data()
loader = torch_loader(DataLoader(data, 8, shuffle=True), torch.device("cpu"), epochs=3)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
run = Exact(out, loader, model=model, optimizer=optimizer, scheduler=scheduler, save_every=3)
for epoch in loader.epochs_from(run.resume()):
    for inputs, targets in loader:
        optimizer.zero_grad()
        if mode == "inner" and loader.step == 6:
            second.fails = True
            next(iter(torch_loader(DataLoader(second, 8), torch.device("cpu"))))
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        due = run.end_step()
        if due.save and mode != "save after":
            run.save()
    scheduler.step()
    with torch.no_grad():
        model.bias += torch.rand(1)
    if mode == "save after":
        run.save()
    if mode == "break" and epoch == 1:
        break
    Data.fails = mode in ("wait", "error") and epoch == 1
run.close()
print(f"rate={optimizer.param_groups[0]['lr']}")
torch.save(model.state_dict(), f"{out}/final.pth")
"""


def train(folder, mode, code=0):
    return run("-c", SCRIPT, str(folder), mode, code=code)


MODES = [("wait", 128 + signal.SIGTERM), ("error", None), ("break", 0)]
INNER = ("inner", 128 + signal.SIGTERM)  # the step reads a batch of a second loader when the signal comes


@pytest.mark.parametrize(("mode", "code"), [*MODES, pytest.param(*INNER, marks=pytest.mark.thorough)])
def test_a_run_that_is_stopped_between_two_epochs_or_in_a_step_continues_exactly(mode, code, tmp_path):
    whole = train(tmp_path / "whole", "whole").stdout
    stopped = train(tmp_path / "other", mode, code).stdout
    assert mode != "inner" or re.search(r"stopped\D* step 6\b", stopped), "not before the end of the step"
    restarted = train(tmp_path / "other", "whole").stdout
    assert "resumed from" in restarted
    assert restarted.splitlines()[-1] == whole.splitlines()[-1], stopped + restarted
    states = [torch.load(tmp_path / name / "final.pth") for name in ("whole", "other")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_save_after_the_batches_is_refused(tmp_path):
    errors = train(tmp_path / "run", "save after", None).stderr
    assert re.search(r"save\(\) after the batches .*step 4\b", errors)
