"""On a Ray cluster of several nodes: workers and nodes are killed, and clusters that have too few CPUs."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT, environment, names
from tests.support.ray_nodes import RayNodes

pytest.importorskip("ray", reason='Ray is not installed: pip install "ray>=2.52"')
pytestmark = pytest.mark.thorough

KILLS, EVERY, BATCH = 12, 8, 4

LOADER = f"""
import json, sys, time
import numpy as np, torch
from datasets.compat.dpex import RayDataLoader

class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return {KILLS * EVERY * BATCH + 40}
    def __getitem__(self, id):
        time.sleep(0.005)
        return id, torch.rand(2), np.random.rand()

workers, cpus = json.loads(sys.argv[1])
torch.manual_seed(1)
with RayDataLoader(Noisy(), True, batch_size={BATCH}, shuffle=True, num_workers=workers,
                   cpus_per_worker=cpus) as loader:
    for step, (ids, drawn, more) in enumerate(loader):
        print(json.dumps([ids.tolist(), drawn.tolist(), more.tolist()]), flush=True)
        if step % {EVERY} == 0:
            sys.stdin.readline()
"""


@pytest.fixture
def cluster():
    nodes = RayNodes(1)
    yield nodes
    nodes.close()


def start(cluster, workers: int, cpus: float, before: str = "", stderr=None) -> subprocess.Popen:
    """Start the program. before: statements that come first."""
    command = [sys.executable, "-c", before + LOADER, json.dumps([workers, cpus])]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(**cluster.environment), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=stderr, text=True,
    )  # fmt: skip


def read(process: subprocess.Popen, disturb=lambda step: None) -> list:
    """Return the batches. disturb: called with the step, while the process waits."""
    batches = []
    for line in process.stdout:
        if line.startswith("["):
            batches.append(json.JSONDecoder().raw_decode(line)[0])  # Ray may print behind it
            if (len(batches) - 1) % EVERY == 0:
                disturb(len(batches) - 1)
                process.stdin.write("\n")
                process.stdin.flush()
    assert process.wait(60) == 0
    return batches


def test_killed_workers_and_nodes_change_nothing(cluster):
    cluster.add(2)
    cluster.add(2)
    killed = []

    def disturb(step: int) -> None:
        if step and len(killed) < KILLS:
            if len(killed) == 5:
                cluster.remove(0)
                cluster.add(2)
            elif workers := cluster.workers():
                workers[len(killed) % len(workers)].kill()
            killed.append(step)

    expected = read(start(cluster, 4, 1.0))
    assert read(start(cluster, 4, 1.0), disturb) == expected and len(killed) == KILLS
    assert sorted(id for ids, *_ in expected for id in ids) == list(range(KILLS * EVERY * BATCH + 40))


def test_a_cluster_without_cpus_for_all_workers(cluster):
    process = start(cluster, 3, 1.0)
    lines = [process.stdout.readline() for _ in range(2)]
    assert lines[0].startswith("ray: 1 of 3 workers run") and lines[1].startswith("[")
    process.kill()
    process.communicate()
    process = start(cluster, 3, 8.0)
    process.communicate()
    assert process.returncode == 1  # BadInput


def test_a_cluster_whose_cpus_others_hold(cluster):
    holder = start(cluster, 1, 1.0)
    assert holder.stdout.readline().startswith("[")
    impatient = "from datasets.loaders.ray import pool\npool._STARTED = 1.0\n"
    waiting = start(cluster, 1, 1.0, impatient, stderr=subprocess.PIPE)
    _, errors = waiting.communicate()
    holder.kill()
    holder.communicate()
    assert waiting.returncode == 1
    assert names(errors, "the Ray cluster is full", "1 s", "0 of 1 workers of 1 CPU")
