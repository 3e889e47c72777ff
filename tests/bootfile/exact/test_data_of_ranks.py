"""Before the first step the ranks compare their data: one with other labels or samples would train on them
without a line."""

from types import SimpleNamespace

import pytest

from bootfile.exact import start
from bootfile.ground.errors import BadInput
from tests.conftest import ROOT, run_ranks

LOOP = """
import sys, torch
sys.path.insert(0, ROOT)
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from bootfile import BatchSampler, Exact, map_style_loader, torch_loader

kind, form = sys.argv[1:]
torch.distributed.init_process_group("gloo")
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
device = torch.device("cpu")

class Fruits(Dataset):
    def __init__(self):
        self.values = torch.randn(40, 4, generator=torch.Generator().manual_seed(3))
        classes = ["apple", "banana", "cherry", "damson"]
        if rank and form != "same":  # as from a set, whose order is another one in each process
            classes.reverse()
        number = {name: place for place, name in enumerate(classes)}
        found = [number[sorted(classes)[index % 4]] for index in range(40)]
        if form == "labels":
            self.labels = found
        self.find = lambda index: found[index]  # no attribute shows it
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return self.values[index], self.find(index)

data = Fruits()
if kind == "map":
    loader = map_style_loader(data, BatchSampler(40, 20, seed=0, epochs=1).for_rank(rank, size), device)
else:
    sampler = DistributedSampler(data) if kind == "torch" else None
    loader = torch_loader(DataLoader(data, 10, sampler=sampler), device, epochs=1)
model = torch.nn.Linear(4, 4)
forward = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = Exact("OUT", loader, model=model, forward=forward, optimizer=optimizer)
for epoch in loader.epochs_from(run.resume()):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(forward(x), y).backward()
        optimizer.step()
        if run.end_step().save:
            run.save()
run.close()
print("done", flush=True)
"""


@pytest.mark.parametrize(
    "kind, form, is_refused",
    [
        ("torch", "labels", True),
        ("map", "hidden", True),
        pytest.param("torch", "hidden", True, marks=pytest.mark.thorough),
        pytest.param("map", "labels", True, marks=pytest.mark.thorough),
        pytest.param("map", "same", False, marks=pytest.mark.thorough),
        # without a sampler that divides one data set, each rank may have a part of its own
        ("own", "labels", False),
    ],
)
def test_a_rank_with_other_data_is_refused(tmp_path, kind, form, is_refused):
    loop = tmp_path / "loop.py"
    loop.write_text(LOOP.replace("ROOT", repr(str(ROOT))))
    for result in run_ranks(loop, kind, form, cwd=tmp_path, code=int(is_refused)):
        if is_refused:
            assert "BadInput: rank 1 has other training data" in result.stderr
            assert ("list of training samples" in result.stderr) == (form == "labels")
        else:
            assert "done" in result.stdout


def test_a_rank_whose_loader_does_not_tell_its_data_is_refused(monkeypatch):
    parts = SimpleNamespace(loader=SimpleNamespace(compared_data={"samples": 40}))
    monkeypatch.setattr(start.ranks, "gather_objects", lambda facts: [facts, ({}, facts[1])])
    with pytest.raises(BadInput, match=r"rank 1 .* its samples is missing, not 40"):
        start._compare_data(parts)
