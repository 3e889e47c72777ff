"""The price of what knows a rank that is slow, stuck or lost: 8 processes with steps of 5 ms, in turns.

    python -m tests.benchmarks.pace
    python -m tests.benchmarks.pace --processes 8 --milliseconds 5 --steps 400 --rounds 5

"with" has what a run has by default: the measurement of the ranks (pace.py), the watch for a run that does
not move (stuck.py) and the survivors' thread (survivor.py). "without" has none of them. Each process waits a
given time in its forward pass, so the steps do not need 8 cores. The first figure is the median of the ratios
of neighbouring runs, which share the processes; with fewer cores than processes it is the price of a core.
The second is the CPU time that a step of one rank needs more. There is a report every 100 steps.
"""

import argparse
import contextlib
import functools
import tempfile
import time

import torch
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from bootfile import Exact, Job, torch_loader, usual
from bootfile.exact import pace, survivor
from bootfile.exact.due import Interval
from bootfile.ground import errors
from tests.benchmarks.rounds import conditions, divide, make_parser, spread, take_turns
from tests.conftest import free_port


class Work(torch.nn.Module):
    """Waits in each forward pass."""

    def __init__(self, seconds: float):
        super().__init__()
        self._seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self._seconds)
        return inputs


def train(args: argparse.Namespace, measures: bool, cpu: list[float]) -> float:
    """Return the seconds of a step. cpu: gets the CPU seconds of a step of a rank, the mean of all."""
    samples = args.steps * args.processes
    torch.manual_seed(0)  # all ranks have the same data
    data = TensorDataset(torch.randn(samples, 16), torch.randn(samples, 1))
    loader = torch_loader(DataLoader(data, 1, sampler=DistributedSampler(data)), torch.device("cpu"))
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), Work(args.milliseconds / 1000), torch.nn.Linear(64, 1)
    )
    forward = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plugins = usual(stuck_after=60.0 if measures else 0.0)
    if not measures:
        plugins = [plugin for plugin in plugins if not isinstance(plugin, pace.Pace | survivor.Survivor)]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        run = Exact(
            folder, loader, model=model, forward=forward, optimizer=optimizer,
            report_every=Interval(100, "step"), plugins=plugins, job=Job(writes=False),
        )  # fmt: skip
        for _ in loader.epochs_from(run.resume()):
            begin = time.perf_counter()
            cpu_begin = time.process_time()
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(forward(inputs), targets)
                loss.backward()
                if run.accepts(loss):
                    optimizer.step()
                run.end_step()
            torch.distributed.barrier()
            seconds = time.perf_counter() - begin
            used = torch.tensor(time.process_time() - cpu_begin, dtype=torch.float64)
    torch.distributed.all_reduce(used)
    cpu.append(used.item() / args.processes / args.steps)
    return seconds / args.steps


def measure(rank: int, args: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.processes
    )
    cpu: dict[str, list[float]] = {"without": [], "with": []}
    turns = {name: functools.partial(train, args, name == "with", times) for name, times in cpu.items()}
    seconds = take_turns(turns, args.rounds)
    if rank == 0:
        for name, values in seconds.items():
            # the first round warms up
            cpu_times = spread([1000 * value for value in cpu[name][1:]], ".3f")
            wall_times = spread([1000 * value for value in values], ".3f")
            print(f"{name}: {wall_times} ms a step, {cpu_times} of CPU")
        print(f"ratio: {spread(divide(seconds['with'], seconds['without']), '.4f')}")
        more = [1e6 * (one - other) for one, other in zip(cpu["with"][1:], cpu["without"][1:], strict=True)]
        print(f"CPU time of a step of a rank: {spread(more, '.0f')} us more", flush=True)
    torch.distributed.barrier()
    errors.leave(0)  # the interpreter's teardown aborts if a thread of gloo still runs


def main() -> None:
    parser = make_parser(__doc__, 5)
    for name, default in (("processes", 8), ("milliseconds", 5), ("steps", 400)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    args = parser.parse_args()
    with conditions():
        print(f"{args.processes} processes, a wait of {args.milliseconds} ms in each step", flush=True)
        torch.multiprocessing.spawn(measure, (args, free_port()), nprocs=args.processes)


if __name__ == "__main__":
    main()
