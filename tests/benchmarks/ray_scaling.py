"""RayDataLoader on clusters of 1, 2 and 4 nodes on this machine: does a node more bring what it has?

    python -m tests.benchmarks.ray_scaling

The transform only waits, 20 ms a sample, so that nodes do not share what limits them: what is measured is the
loader, its queues and the way back. Real decoding on one machine is limited by its cores, whatever the nodes.
"""

import argparse
import os
import time

import torch
from torch.utils.data import Dataset

from datasets.compat.dpex import RayDataLoader
from tests.benchmarks.machine import describe
from tests.support.ray_nodes import RayNodes

WAIT, BATCH, PER_NODE = 0.02, 16, 2  # seconds a sample; samples; workers a node


class Waits(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, id):
        time.sleep(WAIT)
        return torch.zeros(3, 64, 64, dtype=torch.uint8), id


def rate(nodes: int, seconds: float) -> float:
    """samples/s of a cluster of so many nodes, after what was made ready."""
    cluster = RayNodes(PER_NODE, *[PER_NODE] * (nodes - 1))
    os.environ.update(cluster.environment)
    try:
        with RayDataLoader(Waits(), True, batch_size=BATCH, num_workers=PER_NODE * nodes) as loader:
            batches = iter(loader)
            time.sleep(5 + 2 * nodes)  # all workers are there
            for _ in range(4 * PER_NODE * nodes):
                next(batches)
            count, begin = 0, time.perf_counter()
            while time.perf_counter() - begin < seconds:
                count += len(next(batches)[1])
            return count / (time.perf_counter() - begin)
    finally:
        cluster.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each cluster (default: 10)")
    args = parser.parse_args()
    print(f"{describe()}; {PER_NODE} workers a node, {WAIT * 1000:g} ms a sample, batches of {BATCH}")
    first = None
    for nodes in (1, 2, 4):
        found = rate(nodes, args.seconds)
        first = first or found
        ideal = PER_NODE * nodes / WAIT
        print(
            f"{nodes} nodes: {found:.1f} samples/s, {found / first:.2f}x of one node "
            f"({found / first / nodes:.1%} a node), {found / ideal:.1%} of what waiting allows",
            flush=True,
        )
    print(describe())


if __name__ == "__main__":
    main()
