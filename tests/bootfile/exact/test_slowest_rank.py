"""The rank that costs a job time is named, with its phase; ranks that are equal are not."""

import re

import pytest

from bootfile.exact.pace import Announcer, Pace, Times, find_slowest
from bootfile.processes.host_names import group_nodes
from tests.conftest import ROOT, run_ranks

TWO_NODES = group_nodes([("a", 0), ("a", 1), ("b", 0), ("b", 1)])
# A loop of two ranks. Rank 1 is slow in its data, then after its backward pass, then not.
LOOP = """
import sys, time
sys.path.insert(0, sys.argv[3])
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from bootfile import Exact, torch_loader, usual
from bootfile.exact import pace
from bootfile.exact.due import Interval

pace._SECONDS = 0.5  # a window of a few steps is enough here
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
steps = 0

class Samples(Dataset):
    def __len__(self):
        return 560

    def __getitem__(self, place):
        if rank == 1 and 20 <= steps < 50:
            time.sleep(0.05)
        return torch.full((4,), place % 10 / 10.0), torch.zeros(1)

class Work(torch.nn.Module):
    def forward(self, inputs):
        time.sleep(0.01)
        if rank == 1 and 50 <= steps < 80 and WHERE == "forward":
            time.sleep(0.2)
        return inputs

WHERE = sys.argv[2]
samples = Samples()
loader = DataLoader(samples, 2, sampler=DistributedSampler(samples))
loader = torch_loader(loader, torch.device("cpu"), epochs=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), Work(), torch.nn.Linear(8, 1))
forward = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
plugins = usual(slow_rank=0.4)
run = Exact(
    sys.argv[1], loader, model=model, forward=forward, optimizer=optimizer,
    report_every=Interval(5, "step"), plugins=plugins,
)
for _ in loader.epochs_from(run.resume()):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(forward(inputs), targets)
        loss.backward()
        if rank == 1 and 50 <= steps < 80 and WHERE == "after backward":
            time.sleep(0.2)
        if WHERE == "forward":
            run.accepts(loss)
        optimizer.step()
        run.end_step()
        steps += 1
run.close()
print("lost", *(plugin.lost for plugin in plugins if hasattr(plugin, "lost")))
torch.distributed.destroy_process_group()
"""


def make(busy: float, data: float = 0.02, **others: float) -> Times:
    """Return the times of a rank whose steps are all alike, of 1 second."""
    values = {"usual": busy} | others
    return Times(steps=40, busy=busy, data=data, waiting=max(0.0, 1 - busy), **values)


def test_a_rank_is_slow_in_its_data_or_in_its_computing():
    fast = [make(0.5) for _ in range(3)]
    slow = find_slowest([*fast, make(0.9, data=0.42)], TWO_NODES)
    assert (slow.ranks, slow.phase) == ((3,), "data")
    assert slow.cost == pytest.approx(0.4) and slow.share == pytest.approx(0.4)
    slow = find_slowest([fast[0], make(0.9), *fast[1:]], TWO_NODES)
    assert (slow.ranks, slow.phase) == ((1,), "compute")
    assert slow.seconds == pytest.approx(0.88) and slow.others == pytest.approx(0.48)


def test_a_node_is_slow_if_all_its_ranks_are():
    slow = find_slowest([make(0.5), make(0.5), make(0.9), make(0.8)], TWO_NODES)
    assert (slow.ranks, slow.phase) == ((2, 3), "compute")
    slow = find_slowest([make(0.5), make(0.5), make(0.55), make(0.9)], TWO_NODES)
    assert slow.ranks == (3,)
    uneven = group_nodes([("a", 0), ("b", 0), ("b", 1), ("b", 2)])
    slow = find_slowest([make(0.5), make(0.9), make(0.9), make(0.9)], uneven)
    assert slow.ranks == (1, 2, 3)
    alone = group_nodes([("a", 0), ("b", 0)])
    assert find_slowest([make(0.5), make(0.9)], alone).ranks == (1,), "a node of one rank is that rank"


def test_nodes_of_one_host_name_have_numbers():
    assert [node.name for node in TWO_NODES] == ["a", "b"]
    simulated = group_nodes([("here", 0), ("here", 1), ("here", 0), ("here", 1)])
    assert [(node.name, node.ranks) for node in simulated] == [("0", (0, 1)), ("1", (2, 3))]
    unknown = group_nodes([("a", -1), ("b", -1), ("a", -1)])  # mpirun may deal them out in turns
    assert [node.ranks for node in unknown] == [(0, 2), (1,)]


def test_ranks_that_wait_for_each_other_inside_show_slow_data():
    """With SyncBatchNorm or FSDP the others wait within their computing: the own seconds are all alike."""
    times = [make(0.9, data=0.02), make(0.9, data=0.42)]
    nodes = group_nodes([("a", 0), ("b", 0)])
    assert find_slowest(times, nodes).cost == 0
    slow = find_slowest(times, nodes, waits_inside=True)
    assert (slow.ranks, slow.phase) == ((1,), "data") and slow.cost == pytest.approx(0.4)


class Said:
    """An Announcer, and the lines that it has said."""

    def __init__(self):
        self.lines: list[str] = []
        self._announcer = Announcer(0.1, self.lines.append)
        self._step = 40

    def note(self, *times: Times) -> list[str]:
        """Return the lines of a report."""
        self.lines.clear()
        first = self._step + 1
        self._step += 40
        self._announcer.note(first, self._step, times, TWO_NODES)
        return [*self.lines]


def test_a_slow_rank_is_named_once_and_again_when_it_changes_or_ends():
    said = Said()
    even = [make(0.5) for _ in range(4)]
    assert said.note(*even) == []
    assert said.note(*even[:3], make(0.91, data=0.43)) == [
        "slowest rank 3 (node b): data 0.43 s of each step, median of the others 0.02, since step 81"
    ]
    assert said.note(*even[:3], make(0.8, data=0.32)) == [], "it was named"
    assert said.note(make(0.55), *even[1:3], make(0.8, data=0.32)) == [], "another one that costs less"
    line, = said.note(make(0.99), *even[1:3], make(0.8, data=0.32))  # fmt: skip
    assert line.startswith("slowest rank 0 (node a): compute 0.97 s of each step"), "it costs more now"
    line, = said.note(*even)  # fmt: skip
    assert re.fullmatch(r"rank 0 \(node a\) .*not slow .*step 280", line)
    assert said.note(*even) == []
    assert said.note(*even[:2], make(0.9), make(0.9)) == [
        "slowest node b (ranks 2 to 3): compute 0.88 s of each step, median of the others 0.48, since "
        "step 321"
    ]


def test_one_long_step_is_not_a_slow_rank():
    said = Said()
    assert said.note(*[make(0.5) for _ in range(3)], make(0.7, usual=0.5)) == []


def test_figures_name_the_rank_of_the_maximum():
    pace = Pace(0.1)
    assert pace.figures() == {}
    pace._times = [make(0.5), make(0.9, data=0.42)]
    table = pace.figures()
    assert table["data"] == pytest.approx({"min": 0.02, "median": 0.22, "max": 0.42, "rank": 1})
    assert table["waiting"]["rank"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["forward", "after backward"])
def test_a_loop_of_ones_own_names_its_slow_rank(where, tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    first, _ = run_ranks(script, tmp_path / "out", where, ROOT)
    said = ("slowest rank 1 .*: data 0", "slowest rank 1 .*: compute 0", "not slow any more")
    assert re.search(r"\..*".join(said), first.stdout, re.DOTALL), first.stdout
    lost = float(re.search(r"^lost (\S+)$", first.stdout, re.MULTILINE)[1])
    assert 0 < lost < 1
