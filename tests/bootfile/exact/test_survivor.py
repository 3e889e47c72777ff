"""Rank 0 saves the last finished step when another rank is lost, or another one if rank 0 is, and the restart
is exact."""

import functools
import os
import re
import signal

import pytest
import torch

from bootfile.exact import recorded
from bootfile.exact.files import list_newest_first
from bootfile.exact.marks import Marks
from bootfile.receipt.compare import compare_receipts, compare_states
from bootfile.receipt.reading import read
from tests.conftest import (
    QUICK,
    ROOT,
    finish,
    processes_of,
    read_until,
    run,
    run_ranks,
    start,
    start_ranks,
    wait_until,
)

EPOCH = 8  # steps
EPOCHS = 3
# Rank LOST (-1: the last one) waits before the forward pass of a step, or before its end if it does not call
# accepts(), if a file has the number of the step. Then the file gets another name.
LOOP = """
import os, sys, time, torch
sys.path.insert(0, ROOT)
from torch.utils.data import DataLoader, DistributedSampler
from bootfile import BatchSampler, Exact, map_style_loader, torch_loader, usual

kind, hang = sys.argv[1], sys.argv[2]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.distributed.init_process_group("gloo")

class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return self.inputs[index] + torch.rand(4) / 8, self.inputs[index].sum(0, keepdim=True)

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
)
forward = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model[:3].parameters(), lr=0.01)
second = torch.optim.SGD(model[3].parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
if kind == "torch":
    data = Data()
    sampler = DistributedSampler(data)
    loader = torch_loader(DataLoader(data, 4, sampler=sampler), torch.device("cpu"), epochs=EPOCHS)
else:
    loader = map_style_loader(Data(), BatchSampler(64, 8, 0, epochs=EPOCHS), torch.device("cpu"))
run = Exact(
    "OUT", loader, model=model, forward=forward, optimizer=optimizer, scheduler=scheduler, save_every=1000,
    plugins=usual(survivors=SURVIVORS), second=second
)
def wait():
    if rank == LOST % size and os.path.exists(hang) and open(hang).read() == str(loader.step):
        os.rename(hang, hang + ".reached")
        while True:
            time.sleep(1)

count = 2 if kind == "accumulate" else 1
for epoch in loader.epochs_from(run.resume()):
    for inputs, targets in loader:
        if kind != "unasked":
            wait()
        loss = (forward(inputs) - targets).square().mean()
        loss.backward()
        if kind == "unasked" or run.accepts(loss):
            if loader.step % count == 0:
                optimizer.step()
                second.step()
                model.zero_grad()
        if kind == "unasked":
            wait()
        if run.end_step().save:
            run.save()
        if rank == 0:
            print("step", loader.step, flush=True)
    scheduler.step()
    for group in second.param_groups:
        group["lr"] *= 0.5
run.close()
if rank == 0:
    print("weights", sum(value.double().sum().item() for value in model.state_dict().values()), flush=True)
"""


def write(folder, lost=-1, survivors="first"):
    values = (str(ROOT), EPOCHS, lost, survivors)
    text = f"ROOT, EPOCHS, LOST, SURVIVORS = {values!r}\n"
    (folder / "own.py").write_text(text + LOOP)
    return folder / "own.py"


def lose(folder, kind, step, ranks=2, lost=-1, survivors="first", save_every=1000):
    """Kill a rank, the last one or `lost`, in the data of a step, and return what the others printed."""
    hang = folder / "hang"
    script = write(folder, lost, survivors)
    script.write_text(script.read_text().replace("save_every=1000", f"save_every={save_every}"))
    hang.write_text(str(step))
    jobs = start_ranks(script, kind, hang, ranks=ranks, cwd=folder)
    wait_until((folder / "hang.reached").exists, jobs[lost])
    jobs[lost].send_signal(signal.SIGKILL)
    jobs.pop(lost).wait()
    ended = [finish(job, None) for job in jobs]
    assert all(job.returncode for job in ended)
    return "".join(job.stdout for job in ended)


@pytest.fixture(scope="module")
def run_undisturbed(tmp_path_factory):
    """A function that returns the folder of a run without a kill, and what it printed. kind: of the loop."""

    @functools.cache
    def run_once(kind):
        folder = tmp_path_factory.mktemp("whole")
        return folder, run_ranks(write(folder), kind, folder / "hang", cwd=folder)[0].stdout

    return run_once


@pytest.mark.parametrize(
    "kind, step, saved",
    [
        ("map", 5, 4),
        # its schedule changes between the two steps
        pytest.param("map", EPOCH + 1, EPOCH, marks=pytest.mark.thorough),
        pytest.param("map", 2 * EPOCH + 4, 2 * EPOCH + 3, marks=pytest.mark.thorough),
        ("torch", 2 * EPOCH + 4, 2 * EPOCH + 3),
        ("unasked", 5, 5),
    ],
)
def test_a_run_continues_after_the_step_before_the_loss(run_undisturbed, tmp_path, kind, step, saved):
    assert f"saved at step {saved}, after another rank was lost" in lose(tmp_path, kind, step)
    assert_continues(tmp_path, kind, saved, *run_undisturbed(kind))


@pytest.mark.thorough
@pytest.mark.parametrize("step, saved", [(5, 4), (EPOCH + 1, EPOCH)])
def test_another_rank_saves_if_rank_0_is_lost(run_undisturbed, tmp_path, step, saved):
    """BatchNorm's statistics are those of rank 0, also if another rank has saved them."""
    lines = lose(tmp_path, "map", step, lost=0, survivors="any")
    assert lines.count(f"saved at step {saved}, after rank 0 was lost") == 1
    assert_continues(tmp_path, "map", saved, *run_undisturbed("map"))


def assert_continues(folder, kind, saved, whole, printed):
    """Start a run again, and compare it with the folder and the output of an undisturbed one."""
    again = run_ranks(folder / "own.py", kind, folder / "hang", cwd=folder)[0].stdout
    assert re.search(r"^step (\d+)$", again, re.MULTILINE)[1] == str(saved + 1)
    assert printed.splitlines()[-1] == again.splitlines()[-1]
    out, expected = str(folder / "OUT"), str(whole / "OUT")
    assert compare_receipts(expected, out)[0] and compare_states(expected, out)[0]
    assert read(out).starts[-1].steps.last == EPOCH * EPOCHS


@pytest.mark.parametrize("lost", [0, 2])
def test_one_of_several_ranks_saves(tmp_path, lost):
    lines = lose(tmp_path, "map", 5, ranks=4, lost=lost, survivors="any")
    name = "another rank" if lost else "rank 0"
    assert re.findall("saved at .*", lines) == [f"saved at step 4, after {name} was lost"]
    assert recorded.verify(str(tmp_path / "OUT" / "checkpoints" / "step_4.pt"))


def test_no_other_rank_saves_unless_it_is_asked_to(tmp_path):
    lines = lose(tmp_path, "map", 5, lost=0)
    assert "saved at" not in lines
    assert not os.path.exists(tmp_path / "OUT" / "checkpoints")


def test_a_rank_that_does_not_see_the_folder_is_named(tmp_path):
    """Nodes without a common mount: the last rank has a working folder of its own."""
    script = write(tmp_path, survivors="any")
    moved = "torch.manual_seed(0)\nos.chdir(str(rank))\n"
    script.write_text(script.read_text().replace("torch.manual_seed(0)\n", moved))
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    first = run_ranks(script, "map", tmp_path / "hang", cwd=tmp_path)[0]
    assert re.search("warning: rank 1 .*/0/OUT of rank 0.*cannot save", first.stdout)


def test_gradients_that_wait_are_not_saved(tmp_path):
    printed = lose(tmp_path, "accumulate", 6)  # after the first of two batches
    assert re.search("warning: step 6 .*not saved .*another rank .*gradients", printed)
    assert not os.path.exists(tmp_path / "OUT" / "checkpoints")


def test_a_step_that_is_saved_already_is_not_saved_again(tmp_path):
    assert "saved at step 3" in lose(tmp_path, "map", 4, save_every=1)
    newest = list_newest_first(str(tmp_path / "OUT" / "checkpoints"))[0]
    state = torch.load(newest, weights_only=True)
    assert state["step"] == state["objects"]["receipt"]["step"] == 3


@pytest.mark.thorough
@pytest.mark.parametrize("lost", [1, 0])
def test_a_job_whose_launcher_ends_the_other_ranks(tmp_path, lost):
    words = ["jobs/train_ddp.py", *QUICK, "--processes_per_node=2", "--epochs=1", "--report_every=1"]
    run(*words, "--save_every=1000", f"--output_dir={tmp_path / 'whole'}")
    words += ["--save_every=1000", "--survivors=any", f"--output_dir={tmp_path / 'killed'}"]
    job = start(*words, fresh=True)
    read_until(job, " step=5/")
    os.kill(processes_of(job)[lost], signal.SIGKILL)
    saved = re.search(r"saved at step (\d+), after (another rank|rank 0) was lost", finish(job, None).stdout)
    again = run(*words).stdout
    assert f"step {saved[1]} " in re.search(r"resumed from .*", again)[0]
    assert compare_receipts(str(tmp_path / "whole"), str(tmp_path / "killed"))[0]
    assert compare_states(str(tmp_path / "whole"), str(tmp_path / "killed"))[0]


@pytest.mark.parametrize("size", [3, 40])
def test_a_write_through_data_is_noticed(size):
    """It moves no version counter of torch. The tensors may still be resized, and be in any layout."""
    buffer = torch.zeros(size)
    images = torch.zeros(2, size, 3, 3).to(memory_format=torch.channels_last)
    weights = [torch.nn.Parameter(torch.zeros(size, 4)), buffer, images, torch.zeros(size, 4)[:, ::2]]
    weights += [torch.zeros(size, dtype=torch.bfloat16), torch.zeros((), dtype=torch.long)]
    weights.append(torch.zeros(size, device="meta"))  # it stands for one on a GPU
    marks = Marks(weights)
    before = marks.read()
    assert marks.read() == before
    for weight in weights[:-1]:
        weight.data.add_(1)
        assert marks.read() != before
        before = marks.read()
    weights[0].data = weights[0].data.clone()
    assert marks.read() != before
    buffer.resize_(size + 1)
