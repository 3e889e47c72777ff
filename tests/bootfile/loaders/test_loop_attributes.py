"""What a loop changes in its data set between epochs is in the checkpoint, and a restart sets it again."""

import math
import types

import pytest
import torch

from bootfile.histories import read_states
from bootfile.loaders.loop_attributes import LoopAttributes
from tests.conftest import ROOT, finish, run, start

LOOP = """
import os, signal, sys, torch
sys.path.insert(0, ROOT)
from torch.utils.data import DataLoader, Dataset
from bootfile import BatchSampler, Exact, map_style_loader, torch_loader

kind, where, die = sys.argv[1], sys.argv[2], int(sys.argv[3])

class Series(Dataset):
    length = 1
    reads = 0
    def __init__(self):
        self.values = torch.sin(torch.arange(100.0) / 7)
    def __len__(self):
        return 32
    def __getitem__(self, index):
        self.reads += 1  # a number of this process: no state
        return self.values[index : index + 8], self.values[index + 8 : index + 8 + self.length].sum()

torch.manual_seed(0)
data = Series()
device = torch.device("cpu")
if kind == "map":
    loader = map_style_loader(data, BatchSampler(32, 8, seed=0, epochs=4), device)
else:
    loader = torch_loader(DataLoader(data, 8, shuffle=True), device, epochs=4)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = Exact("OUT", loader, model=model, optimizer=optimizer, save_every=int(sys.argv[4]))
for epoch in loader.epochs_from(run.resume()):
    if where == "begin":
        data.length = 1 + epoch
    if where == "count":
        data.length += 1
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x)[:, 0], y).backward()
        optimizer.step()
        if run.end_step().save:
            run.save()
        if loader.step == die:
            run.saver.collect(wait=True)
            os.kill(os.getpid(), signal.SIGKILL)
    if where == "end":
        data.length += 1
run.close()
"""


@pytest.mark.parametrize(
    "kind, where, die, save_every",
    [
        ("map", "count", 7, 3),
        ("torch", "end", 8, 4),  # the last step of an epoch: the code after it runs again
        pytest.param("map", "begin", 9, 4, marks=pytest.mark.thorough),
        pytest.param("torch", "count", 7, 3, marks=pytest.mark.thorough),
    ],
)
def test_a_restart_equals_the_whole_run(tmp_path, kind, where, die, save_every):
    loop = tmp_path / "loop.py"
    loop.write_text(LOOP.replace("ROOT", repr(str(ROOT))))
    states = []
    for name, step in (("whole", 0), ("killed", die)):
        folder = tmp_path / name
        folder.mkdir()
        words = (loop, kind, where, step, save_every)
        if step:
            finish(start(*words, cwd=folder), -9)
            shown = run(*words[:3], 0, save_every, cwd=folder).stdout
            assert "length = " in shown and "reads" not in shown
        else:
            run(*words, cwd=folder)
        states.append(read_states(str(folder / "OUT"))[16]["digest"])
    assert states[0] == states[1]


def test_only_what_the_loop_changes_counts():
    inner = types.SimpleNamespace(p=0.1, table=torch.zeros(3), name="a")
    data = types.SimpleNamespace(length=1, transform=inner, cache=None, limit=math.nan, handle=open)
    found = LoopAttributes(data)
    data.length = 5  # before the training
    found.end_epoch()
    found.begin_epoch()
    data.cache = 7  # by reading
    found.end_epoch()
    assert found.state() == {}
    inner.p = 0.2
    found.begin_epoch()
    assert found.state() == {"transform.p": 0.2}
    found.end_epoch()
    data.length = 6  # after the last epoch
    assert found.state() == {"length": 6, "transform.p": 0.2}
    found.enter_epoch()
    data.length = 7  # in the body of the next one, which a restart runs again
    assert found.state()["length"] == 6
    found.leave_epoch()
    assert found.state()["length"] == 7

    again = types.SimpleNamespace(length=1, transform=types.SimpleNamespace(p=0.1))
    restored = LoopAttributes(again)
    restored.restore({"length": 6, "transform.p": 0.2, "gone.x": 1})
    assert (again.length, again.transform.p) == (6, 0.2)
    restored.end_epoch()
    assert restored.state() == {"length": 6, "transform.p": 0.2}
