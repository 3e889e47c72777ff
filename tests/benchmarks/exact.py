"""The price of the same bits: steps of exact.Shards and of DistributedDataParallel with no_sync(), in turns.

    python -m tests.benchmarks.exact                       ResNet-18 of the default width, 2 processes, V = 8
    python -m tests.benchmarks.exact --processes 2 --shards 8 --rounds 5 --width 64

Both compute the same micro-batches, V / N in each process, on one thread; their steps alternate in the same
processes. The figure is the median of the ratios of neighbouring steps, with the smallest and the largest.
A second figure is the time of the additions between the processes alone: the tree, against all_reduce.
"""

import argparse
import statistics
import time

import torch
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from common.compute import models
from common.distributed import exact
from common.ground import exits
from tests.conftest import free_port

CLASSES, SIDE = 10, 32  # classes and pixels of CIFAR-10


def measure(rank: int, args: argparse.Namespace, port: int) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.processes
    )
    shards = exact.Shards(args.shards, torch.device("cpu"))
    torch.manual_seed(rank)
    samples = args.batch_size // args.shards
    images = torch.randn(samples, 3, SIDE, SIDE).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, CLASSES, (samples,))

    def build() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
        model = models.resnet18(3, CLASSES, args.width).to(memory_format=torch.channels_last)
        forward = DistributedDataParallel(model)
        forward.broadcast_buffers = False
        return forward, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    plain, plain_optimizer = build()
    ours, our_optimizer = build()
    shards.attach(ours)

    def backward(forward: DistributedDataParallel) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(forward(images), labels)
        loss.backward()
        return loss

    def step_of_ddp() -> None:
        plain_optimizer.zero_grad()
        with plain.no_sync():
            for _ in range(shards.local - 1):
                backward(plain)
        backward(plain)
        plain_optimizer.step()

    def step_of_shards() -> None:
        for _ in range(shards.local):
            our_optimizer.zero_grad()
            shards.add(backward(ours))
        our_optimizer.step()

    flat = torch.randn(sum(each.numel() for each in plain.parameters()))
    tree, ring = (lambda: shards._sum_over_ranks(flat)), (lambda: torch.distributed.all_reduce(flat))
    for name, first, second in (
        (f"a step of {args.batch_size} samples", step_of_ddp, step_of_shards),
        (f"the sum of {flat.numel() * 4 / 1e6:.0f} MB", ring, tree),
    ):
        times = [(timed(first), timed(second)) for _ in range(args.rounds + 2)][2:]
        if rank == 0:
            ratios = sorted(after / before for before, after in times)
            print(
                f"{name}: {statistics.median(each for each, _ in times):.3f} s, with the tree "
                f"{statistics.median(each for _, each in times):.3f} s, ratio "
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}, n={args.rounds})",
                flush=True,
            )
    exits.leave(0)  # the interpreter's teardown aborts if a thread of gloo still runs


def timed(function) -> float:
    torch.distributed.barrier()
    begin = time.perf_counter()
    function()
    torch.distributed.barrier()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("processes", 2), ("shards", 8), ("rounds", 5), ("width", 64), ("batch_size", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {args.processes} processes, V={args.shards}, width {args.width}")
    torch.multiprocessing.spawn(measure, (args, free_port()), nprocs=args.processes)


if __name__ == "__main__":
    main()
