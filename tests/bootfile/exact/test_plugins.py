"""What joins a loop: the order of the calls, the example of the guide, and a loop without any plugin."""

import re

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from bootfile import BadInput, Exact, Plugin, torch_loader, usual
from bootfile.exact.usual import Hung
from tests.conftest import ROOT, environment, run, run_ranks

# Each rank draws its own batches. KILL: the step after which it ends without a word.
LOOP = """
import os, signal, sys, torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from bootfile import Exact, torch_loader

out, kill = sys.argv[1], int(sys.argv[2])
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = torch_loader(DataLoader(data, 4, sampler=DistributedSampler(data)), torch.device("cpu"), epochs=2)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
forward = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
run = Exact(out, loader, model=model, forward=forward, optimizer=optimizer, save_every=3, plugins=[])
for _ in loader.epochs_from(run.resume()):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(forward(inputs), targets)
        loss.backward()
        if run.accepts(loss):
            optimizer.step()
        if run.end_step().save:
            run.save()
        if loader.step == kill:
            run.saver.collect(wait=True)
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
run.close()
if torch.distributed.get_rank() == 0:
    print("weights", sum(value.double().sum().item() for value in model.state_dict().values()))
"""


class Recorder(Plugin):
    def __init__(self):
        self.calls = []

    def begin(self, parts, step):
        self.parts = parts
        self.calls.append(("begin", step))

    def numbers(self):
        self.calls.append(("numbers", self.parts.loader.step))
        return [1.0, float(self.parts.loader.step)]

    def judge(self, maxima):
        assert maxima == [1.0, self.parts.loader.step]
        self.calls.append(("judge", self.parts.loader.step))

    def ended(self, step, due):
        self.calls.append(("ended", step, due.save))

    def saved(self, step):
        self.calls.append(("saved", step))

    def close(self, error):
        self.calls.append(("close", error))


def train(folder, *plugins, steps=None, **options):
    """Train 2 epochs of 2 steps, or fewer steps; return the run."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    loader = torch_loader(DataLoader(data, 4), torch.device("cpu"), epochs=2)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job = Exact(
        str(folder), loader, model=model, optimizer=optimizer, plugins=[*plugins], save_every=2, **options
    )
    for _ in loader.epochs_from(job.resume()):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            if job.end_step().save:
                job.save()
            if loader.step == steps:
                return job
    job.close()
    return job


def test_the_calls_of_a_run_in_their_order(tmp_path):
    recorder = Recorder()
    train(tmp_path, recorder)
    expected = [("begin", 0)]
    for step in range(1, 5):
        expected += [("numbers", step), ("judge", step), ("ended", step, step % 2 == 0)]
        if step % 2 == 0:
            expected.append(("saved", step))
    assert recorder.calls == [*expected, ("close", None)]
    again = Recorder()
    train(tmp_path, again)
    assert again.calls == [("begin", 4), ("close", None)]


def test_a_run_that_ends_with_an_error_closes_its_plugins_once(tmp_path):
    recorder = Recorder()
    job = train(tmp_path, recorder, steps=3)
    error = ValueError("a value")
    job.give_up(error)
    job.give_up(ValueError("a later one"))
    assert recorder.calls[-2:] == [("ended", 3, False), ("close", error)]


def test_what_raises_before_a_save_prevents_it(tmp_path):
    class Refusing(Recorder):
        def begin(self, parts, step):
            super().begin(parts, step)
            parts.before_save.append(self.refuse)

        def refuse(self, step):
            raise BadInput("this state must not be saved")

    with pytest.raises(BadInput, match="must not be saved"):
        train(tmp_path, Refusing())
    assert not [*tmp_path.glob("checkpoints/*.pt")]


def test_each_plugin_is_closed_if_one_raises(tmp_path):
    class Raising(Plugin):
        def close(self, error):
            raise ValueError("this plugin cannot end")

    recorder = Recorder()
    with pytest.raises(ValueError, match="cannot end"):
        train(tmp_path, Raising(), recorder)
    assert recorder.calls[-1] == ("close", None)


def test_another_run_ends_the_plugins_of_one_that_an_exception_has_ended(tmp_path):
    recorder = Recorder()
    left = train(tmp_path / "left", recorder, steps=1)
    train(tmp_path / "next")
    assert recorder.calls[-1][0] == "close" and left.position.ended == 1


def test_a_step_asks_only_the_plugins_that_have_a_question(tmp_path):
    job = train(tmp_path, Plugin(), Recorder())
    sizes = job.parts.guard._sizes
    assert sizes == [3, 2], "stop, save, report; the two numbers of the Recorder"


def test_the_plugin_of_the_guide(tmp_path):
    shown = run(ROOT / "guides/own_loop/plugin.py", tmp_path, env=environment(PYTHONPATH=str(ROOT))).stdout
    lines = re.findall(r"^step (\d+): norm of the gradients (\d\.\d{4})$", shown, re.MULTILINE)
    assert [int(step) for step, _ in lines] == [4, 8, 12, 16] and len({norm for _, norm in lines}) == 4


def test_a_loop_without_plugins_continues_exactly(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{LOOP}")
    whole = run_ranks(script, tmp_path / "whole", 0)
    run_ranks(script, tmp_path / "killed", 5, code=-9)
    again = run_ranks(script, tmp_path / "killed", 0)
    assert "resumed from" in again[0].stdout
    assert re.findall("weights.*", again[0].stdout) == re.findall("weights.*", whole[0].stdout) != []


def test_one_process_watches_only_whether_the_run_moves():
    assert [type(plugin) for plugin in usual(is_job=True)] == [Hung]
    with pytest.raises(BadInput, match="survivors"):
        usual(survivors="all")


def test_an_option_of_a_job_or_a_plugin_is_no_object(tmp_path):
    with pytest.raises(BadInput, match=r"stuck_after=.* float: .*usual\("):
        train(tmp_path, stuck_after=5.0)
