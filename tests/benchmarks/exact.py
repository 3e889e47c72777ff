"""The price of the same bits: steps of Shards and of DistributedDataParallel with no_sync(), in turns.

    python -m tests.benchmarks.exact                       ResNet-18 of the default width, 2 processes, V = 8
    python -m tests.benchmarks.exact --processes 2 --shards 8 --rounds 5 --width 64

Both compute the same micro-batches, V / N in each process, on one thread; their steps alternate in the same
processes. The figure is the median of the ratios of neighbouring steps, with the smallest and the largest.
A second figure is the time of the additions between the processes alone: the tree, against all_reduce.
A third one is the CPU seconds of rank 0 in a step with the sums of gradients that --recheck records.
"""

import argparse
import functools
from collections.abc import Callable

import torch
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from bootfile.ground import errors
from common.compute import models
from common.parallel import exact_shards
from common.parallel.recheck import sum_bits
from tests.benchmarks.rounds import conditions, cpu_seconds, make_parser, print_ratios, take_turns, timed
from tests.conftest import free_port

CLASSES, SIDE = 10, 32  # classes and pixels of CIFAR-10


def measure(rank: int, args: argparse.Namespace, port: int) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.processes
    )
    shards = exact_shards.Shards(args.shards, torch.device("cpu"))
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

    def step_of_shards(has_sums: bool = False) -> None:
        for _ in range(shards.local):
            our_optimizer.zero_grad()
            loss = backward(ours)
            if has_sums:  # before add(), which takes the gradients
                sum_bits([each.grad for each in ours.parameters()], torch.device("cpu"))
            shards.add(loss)
        our_optimizer.step()

    flat = torch.randn(sum(each.numel() for each in plain.parameters()))
    own = exact_shards.part_of(args.shards, rank, args.processes)
    rows = flat.repeat(len(exact_shards.list_nodes(own)), 1)  # a row for each node of the tree
    step = f"a step of {args.batch_size} samples"
    for title, find_seconds, contestants in (
        (step, timed_together, {"no_sync()": step_of_ddp, "shards": step_of_shards}),
        (f"the sum of {flat.numel() * 4 / 1e6:.0f} MB", timed_together, {
            "all_reduce": lambda: torch.distributed.all_reduce(flat),
            "tree": lambda: shards._sum_over_ranks(rows),
        }),
        (f"{step}, CPU", cpu_seconds, {
            "shards": step_of_shards, "with sums": functools.partial(step_of_shards, has_sums=True),
        }),
    ):  # fmt: skip
        turns = {name: functools.partial(find_seconds, each) for name, each in contestants.items()}
        seconds = take_turns(turns, args.rounds)
        if rank == 0:
            print_ratios(title, seconds, ".3f", "s")
    errors.leave(0)  # the interpreter's teardown aborts if a thread of gloo still runs


def timed_together(function: Callable[[], object]) -> float:
    """Return the seconds until all processes have called the function."""

    def call():
        function()
        torch.distributed.barrier()

    torch.distributed.barrier()
    return timed(call)


def main() -> None:
    parser = make_parser(__doc__, 5)
    for name, default in (("processes", 2), ("shards", 8), ("width", 64), ("batch_size", 128)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    args = parser.parse_args()
    with conditions():
        print(f"{args.processes} processes, V={args.shards}, width {args.width}", flush=True)
        torch.multiprocessing.spawn(measure, (args, free_port()), nprocs=args.processes)


if __name__ == "__main__":
    main()
