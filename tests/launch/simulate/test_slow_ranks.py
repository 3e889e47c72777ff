"""The faults of `launch simulate` that make a rank or a node slow, as the job sees and names them.

The runs are longer than they need: a test reads the lines of a run until the one that it waits for, and ends
the run. On a busy machine another rank may be named before.
"""

import contextlib
import json
import os
import re
import signal

import pytest

from tests.conftest import QUICK, ROOT, finish, read_until, records, start
from tests.support.simulated import fired, simulate

STEPS = 20_000
# A loop of one's own: each sample is a file of the data, and each forward pass takes CPU time.
LOOP = """
import os, sys, time
sys.path.insert(0, ROOT)
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from bootfile import Exact, torch_loader, usual
from bootfile.exact import pace
from bootfile.exact.due import Interval

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
    report_every=Interval(5, "step"), plugins=usual(slow_rank=0.3),
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


@contextlib.contextmanager
def simulated(*command, env=None):
    """Start a simulation, and end it after the block."""
    options = {"env": env} if env else {}
    job = start("-m", "launch", "simulate", *command, **options)
    try:
        yield job
        job.send_signal(signal.SIGTERM)
        finish(job, None)
    finally:
        job.kill()


def loop_with(folder, fault: str, *words: str, sleep: float = 0.0, burn: float = 0.0):
    """Start the loop on two nodes of two ranks with a fault. sleep, burn: seconds of a forward pass."""
    script = folder / "loop.py"
    text = f"ROOT, STEPS, SLEEP, BURN = {str(ROOT)!r}, {STEPS}, {sleep}, {burn}\n"
    script.write_text(text + LOOP)
    variables = {**os.environ, "OUT": str(folder / "out"), "CUDA_VISIBLE_DEVICES": ""}
    command = ["--platform=azureml", "--nodes=2", "--processes=2", f"--fault={fault}", str(script), "--"]
    return simulated(*command, *words, env=variables)


def write_data(folder):
    data = folder / "data"
    data.mkdir()
    for place in range(10):
        (data / f"{place}.bin").write_bytes(b"0")
    return f"--data_url={data}"


@pytest.mark.thorough
def test_a_throttled_core_is_slow_in_computing(tmp_path):
    fault = "throttle:rank=3,step=10,to=4%"
    with loop_with(tmp_path, fault, burn=0.02) as job:
        lines = read_until(job, r"^\[node 0\] slowest rank 3 \(node 1\): compute [\d.]+ s ")
    assert fired("".join(lines), fault)


@pytest.mark.thorough
def test_a_slow_mount_makes_a_node_slow_in_its_data(tmp_path):
    fault = "slow_data:node=1,step=20,by=0.3s"
    with loop_with(tmp_path, fault, write_data(tmp_path), sleep=0.05) as job:
        pattern = r"^\[node 0\] slowest node 1 \(ranks 2 to 3\): data \d.\d+ s .* since step \d+"
        lines = read_until(job, pattern)
    assert fired("".join(lines), fault)


@pytest.mark.thorough
def test_slow_data_of_one_rank_end(tmp_path):
    fault = "slow_data:rank=2,step=5,by=0.3s,for=20s"
    with loop_with(tmp_path, fault, write_data(tmp_path), sleep=0.05) as job:
        read_until(job, r"^\[node 0\] slowest rank 2 \(node 1\): data \d.\d+ s ")
        # or another rank is slower then
        read_until(job, r"^\[node 0\] (rank 2 \(node 1\) .*not slow .*after step|slowest (?!rank 2))")


@pytest.mark.thorough
def test_a_job_names_its_throttled_rank(tmp_path):
    out = tmp_path / "out"
    # A throttled rank also answers late in the 40 small collectives of a step, for which both ranks wait: a
    # width of 64 makes the computation longer than these waits, also on a busy machine.
    command = ["--processes=2", "--fault=throttle:rank=1,step=2,to=5%", "jobs/train_ddp.py", "--", *QUICK]
    options = ["--width=64", "--max_steps=6", "--batch_size=64", "--report_every=2", f"--train_url={out}"]
    printed = simulate(*command, *options, timeout=1800).stdout
    assert re.search(r"^\[node 0\] slowest rank 1 \(node \S+\): compute ", printed, re.MULTILINE), printed
    of_ranks = [line["ranks"] for line in records(out) if "ranks" in line][-1]
    assert of_ranks["busy"]["rank"] == of_ranks["compute"]["rank"] == 1
    assert of_ranks["busy"]["min"] <= of_ranks["busy"]["median"] <= of_ranks["busy"]["max"]
    lost = re.search(r"training_seconds=\S+ lost_to_slowest=([\d.]+)% receipt=", printed)
    assert float(lost[1]) > 10, json.dumps(of_ranks)
