"""The faults of `launch simulate` that make a rank or a node slow, as the job sees and names them."""

import json
import os
import re

import pytest

from tests.conftest import QUICK, ROOT, records
from tests.support.simulated import fired, simulate

# A loop of one's own: each sample is a file of the data, and each forward pass takes CPU time.
LOOP = """
import os, sys, time
sys.path.insert(0, ROOT)
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from bootfile import Exact, torch_loader
from bootfile.exact import pace
from bootfile.ground.intervals import Interval

pace._SECONDS = 1.0
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
data = next((word.partition("=")[2] for word in sys.argv if word.startswith("--data_url")), None)

class Samples(Dataset):
    def __len__(self):
        return 4 * STEPS

    def __getitem__(self, place):
        if data:
            with open(os.path.join(data, f"{place % 10}.bin"), "rb") as file:
                file.read()
        return torch.full((4,), place % 10 / 10.0), torch.zeros(1)

class Work(torch.nn.Module):
    def forward(self, inputs):
        time.sleep(SLEEP)
        end = time.thread_time() + BURN
        while time.thread_time() < end:
            pass
        return inputs

samples = Samples()
loader = DataLoader(samples, 1, sampler=DistributedSampler(samples))
loader = torch_loader(loader, torch.device("cpu"))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), Work(), torch.nn.Linear(8, 1))
forward = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = Exact(
    os.environ["OUT"], loader, model=model, forward=forward, optimizer=optimizer,
    report_every=Interval(5, "step"), slow_rank=0.3,
)
step = 0
for _ in loader.epochs_from(run.resume()):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(forward(inputs), targets)
        loss.backward()
        run.accepts(loss)
        optimizer.step()
        run.end_step()
        step += 1
        if rank == 0:
            print(f"epoch=1 step={step} loss=1", flush=True)
run.close()
torch.distributed.destroy_process_group()
"""


def slow_lines(folder, fault: str, *words: str, steps: int = 60, sleep: float = 0.0, burn: float = 0.0):
    """Run the loop on two nodes of two ranks with a fault, and return the lines about slow ranks."""
    script = folder / "loop.py"
    text = f"ROOT, STEPS, SLEEP, BURN = {str(ROOT)!r}, {steps}, {sleep}, {burn}\n"
    script.write_text(text + LOOP)
    variables = {**os.environ, "OUT": str(folder / "out"), "CUDA_VISIBLE_DEVICES": ""}
    command = ["--platform=azureml", "--nodes=2", "--processes=2", f"--fault={fault}", str(script), "--"]
    printed = simulate(*command, *words, env=variables).stdout
    assert fired(printed, fault)
    return re.findall(r"^\[node 0\] (.*slow.*)$", printed, re.MULTILINE), printed


@pytest.mark.faults
def test_a_throttled_core_is_slow_in_computing(tmp_path):
    lines, printed = slow_lines(tmp_path, "throttle:rank=3,step=10,to=4%", steps=40, burn=0.02)
    assert lines and re.match(r"slowest rank 3 \(node 1\): compute [\d.]+ s of each step", lines[0]), printed


@pytest.mark.faults
def test_a_slow_mount_makes_a_node_slow_in_its_data(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for place in range(10):
        (data / f"{place}.bin").write_bytes(b"0")
    fault = "slow_data:node=1,step=20,by=0.3s"
    lines, printed = slow_lines(tmp_path, fault, f"--data_url={data}", sleep=0.05)
    pattern = r"slowest node 1 \(ranks 2 to 3\): data 0\.\d+ s of each step, .* since step (\d+)"
    since = [int(match[1]) for match in (re.match(pattern, line) for line in lines) if match]
    assert since and since[0] > 10, printed


@pytest.mark.faults
def test_slow_data_of_one_rank_end(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for place in range(10):
        (data / f"{place}.bin").write_bytes(b"0")
    fault = "slow_data:rank=2,step=5,by=0.3s,for=9s"
    lines, printed = slow_lines(tmp_path, fault, f"--data_url={data}", steps=120, sleep=0.05)
    assert re.match(r"slowest rank 2 \(node 1\): data 0\.\d+ s of each step", lines[0]), printed
    assert any(re.match(r"rank 2 \(node 1\) is not slow any more after step", line) for line in lines), (
        printed
    )


@pytest.mark.faults
def test_a_rank_that_is_stopped_now_and_then(tmp_path):
    fault = "pause:rank=1,every=10step,for=2s"
    lines, printed = slow_lines(tmp_path, fault, steps=70, sleep=0.1)
    pattern = r"slowest rank 1 \(node 0\): compute .*, most of it in \d+ of \d+ steps, since step \d+"
    assert any(re.match(pattern, line) for line in lines), printed
    assert len(re.findall(rf"fault {re.escape(fault)}: SIGSTOP to rank 1", printed)) >= 3


@pytest.mark.faults
def test_a_job_names_its_throttled_rank(tmp_path):
    out = tmp_path / "out"
    fault = "throttle:rank=1,step=3,to=8%"
    command = ["--processes=2", f"--fault={fault}", "jobs/train_ddp.py", "--", *QUICK, "--max_steps=30"]
    printed = simulate(*command, "--batch_size=64", f"--train_url={out}").stdout
    line = re.search(r"^\[node 0\] slowest rank 1 \(node \S+\): compute .*$", printed, re.MULTILINE)
    assert line, printed
    of_ranks = [line["ranks"] for line in records(out) if "ranks" in line][-1]
    assert of_ranks["busy"]["rank"] == of_ranks["compute"]["rank"] == 1
    assert of_ranks["busy"]["min"] <= of_ranks["busy"]["median"] <= of_ranks["busy"]["max"]
    lost = re.search(r"training_seconds=\S+ lost_to_slowest=([\d.]+)% receipt=", printed)
    assert float(lost[1]) > 10, json.dumps(of_ranks)
