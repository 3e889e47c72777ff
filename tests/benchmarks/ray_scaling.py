"""Measure how RayDataLoader scales on clusters of 1, 2 and 4 nodes on this machine.

    python -m tests.benchmarks.ray_scaling

The transform only waits, 20 ms per sample, so that the nodes do not share a limited resource. This measures
the loader, its queues and the transport. Real decoding on one machine is limited by its cores, not by the
nodes.
"""

import os
import time

import torch
from torch.utils.data import Dataset

from datasets.compat.dpex import RayDataLoader
from tests.benchmarks.rounds import describe, make_parser
from tests.support.ray_nodes import RayNodes

WAIT, BATCH, PER_NODE = 0.02, 16, 2  # seconds per sample; samples; workers per node


class Waits(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, id):
        time.sleep(WAIT)
        return torch.zeros(3, 64, 64, dtype=torch.uint8), id


def rate(nodes: int, seconds: float) -> float:
    """Return the samples/s of a cluster of `nodes` nodes, without batches that were prepared before."""
    cluster = RayNodes(PER_NODE, *[PER_NODE] * (nodes - 1))
    os.environ.update(cluster.environment)
    import ray  # reads the environment

    try:
        with RayDataLoader(Waits(), True, batch_size=BATCH, num_workers=PER_NODE * nodes) as loader:
            batches = iter(loader)
            time.sleep(5 + 2 * nodes)  # all workers have started
            for _ in range(4 * PER_NODE * nodes):
                next(batches)
            count, begin = 0, time.perf_counter()
            while time.perf_counter() - begin < seconds:
                count += len(next(batches)[1])
            return count / (time.perf_counter() - begin)
    finally:
        ray.shutdown()  # the next cluster has another address
        cluster.close()


def main() -> None:
    parser = make_parser(__doc__)
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
