"""RayDataLoader without a Ray cluster: it starts one on this machine, which ends with the process."""

import re
import signal

import pytest

from tests.conftest import ROOT, free_port, run
from tests.jobs.test_train_ray import own  # noqa: F401

pytest.importorskip("ray", reason='Ray is not installed: pip install "ray>=2.52"')

PREPARED = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from torch.utils.data.distributed import DistributedSampler
from datasets.compat.dpex import DpexDataLoader

class RandomDataset(torch.utils.data.Dataset):
    def __init__(self, size, length):
        self.len = length
        self.data = torch.randn(length, size)
    def __getitem__(self, index):
        return self.data[index]
    def __len__(self):
        return self.len

def seen(loader):
    print(f"batches: {{[len(batch) for batch in loader]}}", flush=True)
"""
TWO_LOADERS = f"""{PREPARED}
training_data = RandomDataset(5, 400)
options = {{"distribute_mode": True, "num_workers": 10, "batch_size": 100}}
train_loader = DpexDataLoader(training_data, **options, shuffle=True)
test_loader = DpexDataLoader(RandomDataset(5, 200), **options)
for epoch in range(2):
    seen(train_loader)
    seen(test_loader)
os.kill(os.getpid(), signal.SIGKILL)
"""
RANKS = f"""{PREPARED}
torch.distributed.init_process_group("gloo")
dataset = RandomDataset(5, 20)
sampler = DistributedSampler(dataset)
seen(DpexDataLoader(dataset=dataset, distribute_mode=True, batch_size=1, sampler=sampler, num_workers=10))
torch.distributed.barrier()
"""
STARTED = re.compile(
    r"^ray: .*; a cluster is started at 127\.0\.0\.1:\d+, which ends with this process$", re.M
)
FEWER = re.compile(r"^ray: \d+ of 10 workers run: this machine has \d+ CPUs$", re.M)


@pytest.fixture
def alone(own):  # noqa: F811
    """Return an environment that names no cluster."""
    for name in [name for name in own if name.startswith("RAY_")]:
        del own[name]
    return own


def test_two_loaders_of_a_process_share_the_cluster_that_the_first_starts(alone, tmp_path):
    """This is Dpex's call. The process is killed, and the fixture waits until the cluster has ended."""
    result = run("-c", TWO_LOADERS, cwd=tmp_path, env=alone, code=-signal.SIGKILL, timeout=200)
    batches = [line for line in result.stdout.splitlines() if line.startswith("batches")]
    assert batches == ["batches: [100, 100, 100, 100]", "batches: [100, 100]"] * 2, (
        result.stdout + result.stderr
    )
    assert len(STARTED.findall(result.stdout)) == 1 and "prepared here" not in result.stdout
    assert len(FEWER.findall(result.stdout)) in (0, 2)  # none on a machine with 10 cores


@pytest.mark.faults
def test_the_ranks_of_a_machine_share_one_cluster(alone, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    result = run(*launcher, script, cwd=tmp_path, env=alone, timeout=300)
    assert result.stdout.count(f"batches: {[1] * 10}") == 2
    assert len(STARTED.findall(result.stdout)) == 1 and "prepared here" not in result.stdout
