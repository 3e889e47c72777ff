"""If workers, nodes or the head of a Ray cluster are killed, every sample arrives once and in order."""

import gc
import itertools
import random
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset

from datasets.compat.dpex import RayDataLoader
from datasets.sampling.receipt import Receipt
from tests.conftest import ROOT, environment
from tests.support.ray_nodes import RayNodes, wait_until

pytest.importorskip("ray", reason='Ray is not installed: pip install "ray>=2.52"')
pytestmark = pytest.mark.faults

KILLS, EVERY, BATCH = 50, 8, 4


class Noisy(Dataset):
    """A data set of random samples that take some time."""

    def __init__(self, count: int, seconds: float = 0.005):
        self.count, self.seconds = count, seconds

    def __len__(self):
        return self.count

    def __getitem__(self, id):
        time.sleep(self.seconds)
        return id, torch.rand(4), np.random.rand()


@pytest.fixture
def cluster(monkeypatch):
    nodes = RayNodes(1)
    for name, value in nodes.environment.items():
        monkeypatch.setenv(name, value)
    yield nodes
    nodes.close()


def collected(batches, each=lambda step: None) -> tuple[list[int], list, torch.Tensor]:
    receipt, ids, numbers = Receipt(), [], []
    for step, (id, drawn, more) in enumerate(batches):
        receipt.add(id.numpy(), torch.zeros_like(id), (more.numpy(), drawn[:, 0].numpy()))
        ids += id.tolist()
        numbers.append(drawn)
        each(step)
    return ids, numbers, receipt.take()


def test_fifty_kills_of_workers_and_nodes(cluster):
    data, draw, alive, killed, said = Noisy(KILLS * EVERY * BATCH + 40), random.Random(0), [], [], []
    numbers = itertools.count()
    for number in itertools.islice(numbers, 2):
        cluster.add(2)
        alive.append(number)
    children = set(psutil.Process().children())

    def loader():
        torch.manual_seed(1)
        return RayDataLoader(data, True, batch_size=BATCH, shuffle=True, num_workers=4, log=said.append)

    def kill(step: int) -> None:
        if step % EVERY or len(killed) == KILLS:
            return
        if draw.random() < 0.2:
            cluster.remove(alive.pop(draw.randrange(len(alive))))
            cluster.add(2)
            alive.append(next(numbers))
            killed.append("node")
        elif workers := cluster.workers():
            draw.choice(workers).kill()
            killed.append("worker")

    with loader() as calm:
        expected = collected(calm)
    with loader() as disturbed:
        found = collected(disturbed, kill)
    assert len(killed) >= KILLS - 3 and {"node", "worker"} == {*killed}, killed
    assert sorted(found[0]) == list(range(len(data))) and found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1])) and torch.equal(found[2], expected[2])
    print(f"{len(killed)} kills, {killed.count('node')} of nodes; {len(said)} lines")
    wait_until(lambda: not cluster.workers())
    assert set(psutil.Process().children()) <= children


def test_the_head_is_killed_and_the_epoch_goes_on_here(cluster):
    cluster.add(2)
    data, said = Noisy(2400, 0.02), []  # workers live for a while without their head

    def loader():
        torch.manual_seed(1)
        return RayDataLoader(data, True, batch_size=BATCH, shuffle=True, num_workers=3, log=said.append)

    def kill(step: int) -> None:
        if step == 10:
            for process in (*cluster.processes("gcs_server"), *cluster.processes("raylet")):
                process.kill()

    with loader() as calm:
        expected = collected(calm)
    assert not said
    with loader() as disturbed:
        found = collected(disturbed, kill)
    assert found[0] == expected[0] and torch.equal(found[2], expected[2])
    assert sum("prepared here" in line for line in said) == 1, said


def stored(cluster) -> float:
    """Return the bytes in the cluster's object stores."""
    code = """import ray
ray.init("auto", log_to_driver=False, logging_level="error")
print(ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"])
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(**cluster.environment), capture_output=True,
        text=True, timeout=60, check=True,
    )  # fmt: skip
    return float(result.stdout)


def test_ten_epochs_of_two_loaders_abandoned_half_way(cluster):
    cluster.add(3)
    before, children = stored(cluster), set(psutil.Process().children())
    one = RayDataLoader(Noisy(100), True, batch_size=BATCH, num_workers=2)
    two = RayDataLoader(Noisy(100), True, batch_size=BATCH, num_workers=2, persistent_workers=True)
    for epoch in range(10):
        for step, (left, right) in enumerate(zip(one, two, strict=True)):
            assert torch.equal(left[0], right[0])
            if step == 12 and epoch % 2:
                break
    del one, two, left, right
    gc.collect()
    wait_until(lambda: not cluster.workers())
    assert set(psutil.Process().children()) <= children
    wait_until(lambda: abs(stored(cluster) - before) < 1000, 60)
