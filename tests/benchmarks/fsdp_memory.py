"""Memory of a process that trains a sharded model (jobs/train_fsdp.py) on the CPU with gloo.

    python -m tests.benchmarks.fsdp_memory                    100 million parameters on 1, 2 and 4 processes
    python -m tests.benchmarks.fsdp_memory --layers 6 --processes 1,2

The model is a Sequential of Linear layers of 2048 x 2048 without bias, the optimizer AdamW: 16 bytes for each
parameter (weight, gradient, two moments). "before" is the resident set after some steps of a tiny model.
"after" is the resident set after three steps minus "before", "peak" the largest one during these steps minus
"before". Each figure is that of the process with the most.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bootfile.ground import errors
from common.parallel import fsdp
from tests.benchmarks.rounds import conditions, make_parser
from tests.conftest import free_port

SIDE, STEPS, SAMPLES = 2048, 3, 8


def resident(what: str = "VmRSS") -> float:
    """Return the resident set of this process, or its peak (VmHWM), in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(what))


def train(args: argparse.Namespace, processes: int, side: int) -> object:
    """Return a model and its optimizer after some steps."""
    model = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(args.layers)))
    if args.grad_checkpointing:
        fsdp.checkpoint_activations(model)
    mesh = init_device_mesh("cpu", (processes,))
    for layer, policy in fsdp.layers(model, args.precision):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again: not with the whole model
    for _ in range(STEPS):
        model(torch.randn(SAMPLES, side)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def measure(rank: int, args: argparse.Namespace, processes: int, port: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes
    )
    train(args, processes, 16)  # loads the libraries of the first step
    before = resident()
    model = train(args, processes, SIDE)  # noqa: F841  # it is measured with its state
    figures = torch.tensor([before, resident() - before, resident("VmHWM") - before])
    torch.distributed.all_reduce(figures, torch.distributed.ReduceOp.MAX)
    if rank == 0:
        before, after, peak = figures.tolist()
        state = args.layers * SIDE**2 * 16 / processes / 1e6
        print(f"| {processes} | {before:.0f} | {state:.0f} | {after:.0f} | {peak:.0f} |", flush=True)
    errors.leave(0)  # the interpreter's teardown aborts if a thread of gloo still runs


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--processes", default="1,2,4", help="default: %(default)s")
    fsdp.add_arguments(parser)
    args = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # glibc would keep the freed memory of gathered layers
    with conditions():
        print(f"{args.layers * SIDE**2 / 1e6:.0f} million parameters, {args.precision}; MB a process\n")
        print(
            "| processes | before | 16 bytes x parameters / processes | after | peak |\n|---|---|---|---|---|"
        )
        for processes in map(int, args.processes.split(",")):
            torch.multiprocessing.spawn(measure, (args, processes, free_port()), nprocs=processes)


if __name__ == "__main__":
    main()
