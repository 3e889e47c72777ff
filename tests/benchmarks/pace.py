"""The price of measuring the ranks: runs of 8 processes with steps of 5 ms, with and without, in turns.

    python -m tests.benchmarks.pace
    python -m tests.benchmarks.pace --processes 8 --milliseconds 5 --steps 400 --rounds 5

Each process waits a given time in its forward pass, so the steps do not need 8 cores. The figure is the
median of the ratios of neighbouring runs, which share the processes. There is a report every 100 steps.
"""

import argparse
import contextlib
import tempfile
import time

import torch
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from bootfile import Exact, torch_loader
from bootfile.exact import pace
from bootfile.ground import errors
from bootfile.ground.intervals import Interval
from tests.benchmarks.rounds import conditions, divide, make_parser, spread, take_turns
from tests.conftest import free_port


class Without:
    """What a run without the measurement does in the places of a Pace."""

    def __init__(self, *_: object):
        self.lost = 0.0

    def numbers(self) -> list[float]:
        return []

    def judge(self, maxima: list[float]) -> None: ...

    def watch(self, optimizers: object) -> None: ...

    def end_vote(self) -> None: ...

    def end_step(self, loader: object, is_report: bool) -> None: ...


class Work(torch.nn.Module):
    """Waits in each forward pass."""

    def __init__(self, seconds: float):
        super().__init__()
        self._seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self._seconds)
        return inputs


def train(args: argparse.Namespace, measures: bool) -> float:
    """Return the seconds of a step."""
    samples = args.steps * args.processes
    data = TensorDataset(torch.randn(samples, 16), torch.randn(samples, 1))
    loader = torch_loader(DataLoader(data, 1, sampler=DistributedSampler(data)), torch.device("cpu"))
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), Work(args.milliseconds / 1000), torch.nn.Linear(64, 1)
    )
    forward = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    original = pace.Pace
    if not measures:
        pace.Pace = Without  # type: ignore[misc, assignment]
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
            run = Exact(
                folder, loader, model=model, forward=forward, optimizer=optimizer, writes=False,
                report_every=Interval(100, "step"),
            )  # fmt: skip
            for _ in loader.epochs_from(run.resume()):
                begin = time.perf_counter()
                for inputs, targets in loader:
                    optimizer.zero_grad()
                    loss = torch.nn.functional.mse_loss(forward(inputs), targets)
                    loss.backward()
                    if run.accepts(loss):
                        optimizer.step()
                    run.end_step()
                torch.distributed.barrier()
                seconds = time.perf_counter() - begin
    finally:
        pace.Pace = original  # type: ignore[misc]
    return seconds / args.steps


def measure(rank: int, args: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.processes
    )
    turns = {"without": lambda: train(args, False), "with": lambda: train(args, True)}
    seconds = take_turns(turns, args.rounds)
    if rank == 0:
        for name, values in seconds.items():
            print(f"{name}: {spread([1000 * value for value in values], '.3f')} ms a step")
        print(f"ratio: {spread(divide(seconds['with'], seconds['without']), '.4f')}", flush=True)
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
