"""Compute how a job would scale over many GPUs: a model, not a measurement.

    python -m tests.benchmarks.scaling_model --step_ms 6.8 --batch_size 128
    python -m tests.benchmarks.scaling_model --step_ms 1500 --batch_size 128 --gpus_per_node 1 --nodes 2 16
        --inter_gbs 1.25 --latency 20    machines without a GPU, gloo over 10 Gbit Ethernet

Every GPU keeps its batch, so the work of a step grows with the GPUs. On m nodes of g GPUs, n = m g, the sum
of B bytes takes

    ring           2 (n-1)/n B / speed + base + 2 (n-m) hop + 2 (m-1) hop between nodes
    hierarchical   2 (g-1)/g B / intra + 2 (m-1)/m B / inter + base + 2 (g-1) hop + 2 (m-1) hop between nodes

with speed = intra on one node, else min(intra, inter). The first is that of nccl-tests' doc/PERFORMANCE.md;
the second sums within the nodes, then between them, and distributes the sums within them.
DistributedDataParallel sums each bucket while the backward pass computes the next one; the last bucket is
ready when the backward pass has ended. A step takes

    step + last bucket + max(0, other buckets - backward pass) + BatchNorm's sums

The backward pass is 2/3 of the step (it has twice the products of the forward pass). Every BatchNorm over the
global batch waits for a gather of 2C+1 numbers in the forward pass and a sum in the backward pass; only their
latencies count. Efficiency is the step divided by this time. "no overlap" has 0 for the backward pass:
BatchNorm's sums queue behind the buckets in the one NCCL communicator, and the backward pass waits for them,
so little may be hidden. The model omits waiting for the slowest process, data, validation, checkpoints, and
the share of the GPU that communication uses, so real figures are lower. jobs/imagenet.py does not synchronise
BatchNorm: use --batchnorms 0.

Sources of the numbers:
- latencies: NCCL's own model, src/graph/tuning.cc of commit 01afd20a. Large messages (protocol "simple"):
  base 8.4 us, a hop of a ring 3.4 over NVLink and 9.6 over the network. Small ones (LL): a tree
  4.4 + 2 ((g-1) 0.52 + log2(m) 5.0), a ring 3.6 + (n-m) 0.47 + (m-1) 2.7; with
  several nodes, hops in a node take 1.8 times as long.
- within a node: NVLink over NVSwitch, 235 GB/s, the limit of the same file for an A100. NVIDIA's data sheets
  give 300 (V100), 600 (A100) and 900 GB/s (H100, H200) for both directions together: 150, 300, 450 in one.
- between nodes: the line rate of one RoCE adapter a node, 25, 100 and 200 Gbit/s: 3.125, 12.5 and 25 GB/s.
  Headers take a few per cent of it; a node with k adapters has k times as much.
- gradients: 11,173,962 float32 of ResNet-18, in the three buckets that torch 2.14.1 makes of them, in the
  order in which they become ready.
- gloo's latency: one small sum of 2 processes over loopback took 0.26 ms, the median of 500 on a loaded
  machine of 2 cores (2026-11-21): 18 times the tree's figure for 2 nodes.
"""

import math
from typing import NamedTuple

from common.console import arguments

RESNET18_MB = (9.461800, 26.494976, 8.739072)
FORMATS = {"float32": 1.0, "bf16": 0.5}  # --gradient_compression -> bytes per byte of float32
BATCHNORMS = 20  # of ResNet-18
A100_GBS = 235.0
ROCE_GBS = (3.125, 12.5, 25.0)


class Network(NamedTuple):
    """Speeds in GB/s (one direction) of a GPU within a node and of a node; latencies relative to NCCL's."""

    intra_gbs: float
    inter_gbs: float
    latency: float = 1.0


class Step(NamedTuple):
    """A step of one GPU.

    ms: time without communication
    buckets_mb: megabytes of the buckets in float32
    backward: share of the step that hides the sums of all buckets but the last
    batchnorms: number of BatchNorms over the global batch
    """

    ms: float
    buckets_mb: tuple[float, ...] = RESNET18_MB
    backward: float = 2 / 3
    batchnorms: float = BATCHNORMS


def ring_ms(megabytes: float, nodes: int, gpus: int, network: Network) -> float:
    """Return the milliseconds to sum `megabytes` in one ring over all GPUs. gpus: per node."""
    count = nodes * gpus
    if count == 1:
        return 0.0
    speed = network.intra_gbs
    if nodes > 1:
        speed = network.inter_gbs if gpus == 1 else min(network.intra_gbs, network.inter_gbs)
    hops = 8.4 + 2 * (count - nodes) * 3.4 + 2 * (nodes - 1) * 9.6
    return 2 * (count - 1) / count * megabytes / speed + network.latency * hops / 1000


def hierarchical_ms(megabytes: float, nodes: int, gpus: int, network: Network) -> float:
    """Return the milliseconds to sum within the nodes, then between them, and to distribute within them."""
    if nodes * gpus == 1:
        return 0.0
    within = 2 * (gpus - 1) / gpus * megabytes / network.intra_gbs
    among = 2 * (nodes - 1) / nodes * megabytes / network.inter_gbs
    hops = 8.4 + 2 * (gpus - 1) * 3.4 + 2 * (nodes - 1) * 9.6
    return within + among + network.latency * hops / 1000


ALGORITHMS = {"ring": ring_ms, "hierarchical": hierarchical_ms}


def batchnorm_ms(nodes: int, gpus: int, network: Network) -> float:
    """Return the milliseconds that one BatchNorm over the global batch waits in a step."""
    count = nodes * gpus
    if count == 1:
        return 0.0
    hop = 1.8 if nodes > 1 else 1.0
    gather = 3.6 + (count - nodes) * 0.47 * hop + (nodes - 1) * 2.7
    tree = 4.4 + 2 * ((gpus - 1) * 0.52 * hop + math.ceil(math.log2(nodes)) * 5.0)
    return network.latency * (gather + tree) / 1000


def waiting_ms(
    step: Step, nodes: int, gpus: int, network: Network, algorithm: str = "ring", share: float = 1.0
) -> float:
    """Return the milliseconds that a step waits for communication. share: of float32's bytes, see FORMATS."""
    *others, last = [
        ALGORITHMS[algorithm](share * megabytes, nodes, gpus, network) for megabytes in step.buckets_mb
    ]
    late = max(0.0, sum(others) - step.backward * step.ms)
    return last + late + step.batchnorms * batchnorm_ms(nodes, gpus, network)


def main():
    parser = arguments.Parser(__doc__)
    parser.prog = "python -m tests.benchmarks.scaling_model"
    number = arguments.non_negative_float
    add, speed = parser.add_argument, arguments.positive_float
    add("--step_ms", type=speed, required=True, help="time of a step of one GPU without communication")
    add("--batch_size", type=arguments.positive_int, required=True, help="samples per step of one GPU")
    add(
        "--gradient_mb", type=number, nargs="+", default=RESNET18_MB, metavar="MB",
        help="float32 gradients, one number per bucket, in the order of the sums (default: ResNet-18's)",
    )  # fmt: skip
    add("--batchnorms", type=number, default=BATCHNORMS, help="number over the global batch (default: 20)")
    add("--backward", type=number, default=2 / 3, help="share of the step that hides sums (default: 2/3)")
    add("--intra_gbs", type=speed, default=A100_GBS, help="GB/s of a GPU within its node (default: 235)")
    add(
        "--inter_gbs", type=speed, nargs="+", default=ROCE_GBS,
        help="GB/s of a node (default: 3.125 12.5 25)",
    )  # fmt: skip
    add("--latency", type=number, default=1.0, help="times NCCL's; gloo over TCP: about 20 (default: 1)")
    add("--nodes", type=arguments.positive_int, nargs="+", default=(1, 2, 16), help="default: 1 2 16")
    add("--gpus_per_node", type=arguments.positive_int, default=8, help="default: 8")
    args = parser.parse_args()

    step = Step(args.step_ms, tuple(args.gradient_mb), args.backward, args.batchnorms)
    one = 1000 / step.ms
    print("A model, not a measurement. Only the step of one GPU is an input:")
    print(f"{step.ms:g} ms, {one:.4g} steps/s, {one * args.batch_size:,.0f} images/s\n")
    print(
        f"{'GPUs':>7}{'GB/s':>8}  {'sums':<13}{'gradients':<10}{'waits ms':>9}{'steps/s':>9}{'images/s':>12}"
        f"{'efficiency':>12}{'no overlap':>12}"
    )
    print(f"{1:>7}{'':>33}{0:>9.2f}{one:>9.4g}{one * args.batch_size:>12,.0f}{1:>12.1%}{1:>12.1%}")
    for nodes in args.nodes:
        _rows(step, args, nodes)


def _rows(step: Step, args, nodes: int) -> None:
    gpus, blocking = args.gpus_per_node, step._replace(backward=0.0)
    cluster = f"{nodes}x{gpus}" if nodes > 1 else str(gpus)
    for speed in args.inter_gbs if nodes > 1 else (args.intra_gbs,):
        network = Network(args.intra_gbs, speed, args.latency)
        for algorithm in ALGORITHMS if nodes > 1 and gpus > 1 else ("ring",):
            for name, share in FORMATS.items():
                waits, most = (
                    waiting_ms(each, nodes, gpus, network, algorithm, share) for each in (step, blocking)
                )
                rate = 1000 / (step.ms + waits)
                print(
                    f"{cluster:>7}{speed:>8g}  {algorithm:<13}{name:<10}{waits:>9.2f}{rate:>9.4g}"
                    f"{rate * nodes * gpus * args.batch_size:>12,.0f}"
                    f"{step.ms / (step.ms + waits):>12.1%}{step.ms / (step.ms + most):>12.1%}"
                )


if __name__ == "__main__":
    main()
