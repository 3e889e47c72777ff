"""Make a Checkpointer without a job."""

import argparse
from types import SimpleNamespace
from typing import Any

import torch

from bootfile.exact.due import Interval
from bootfile.receipt.receipt import Receipt
from common.checkpoint.checkpointer import Checkpointer
from common.console.arguments import IDENTITY, OPERATION, Arguments, interval
from common.run.log import Log
from common.run.output import Output

DEFAULTS = {
    "weights": None, "evaluate": False, "evaluate_every": 0, "epoch_weights": True,
    "report_every": Interval(1_000_000, "step"), "save_every": Interval(1, "epoch"), "keep": 3,
    "max_bad_steps": 3, "sample_losses": False, "grace": 25.0, "resume": "auto",
    "stuck_after": 0, "slow_rank": 0.1, "stuck_exit": False, "from_run": None, "without": None,
    "keep_every": None, "survivors": "first", "recheck": 0, "preemption": None,
}  # fmt: skip
ROLES = dict.fromkeys(("batch_size", "seed", "dataset"), IDENTITY) | dict.fromkeys(
    (*DEFAULTS, "output_dir", "data_url"), OPERATION
)


class StubLoader:
    """The parts of a training loader that a Checkpointer and a Log use."""

    def __init__(self, steps_per_epoch: int, fingerprint: str = "", total_steps: int | None = None):
        self.receipt, self.waited, self.step = Receipt(fingerprint), 0.0, 0
        self.is_whole = True
        self.sampling = {}
        self.plan = SimpleNamespace(index=SimpleNamespace())
        self.to_device = SimpleNamespace(device=torch.device("cpu"))
        self._steps_per_epoch, self.collate_fn, self.total_steps = steps_per_epoch, None, total_steps

    def __len__(self):
        return self._steps_per_epoch

    def lead(self, step, part):
        self.step = step

    def add_generator(self, value):
        return False

    def find_unknown_generators(self, parts, saved):
        return []

    def commit(self, step, folder):
        self.receipt.chain(step, len(self), self.receipt.take(), folder)


def run_of(args: argparse.Namespace) -> Any:
    """Return the run of a job with these options; DEFAULTS are those of the others."""
    options = Arguments(**DEFAULTS | vars(args)).finish(ROLES)
    output = Output(options.output_dir)
    return SimpleNamespace(
        args=options, output=output, log=Log(options, output), topology=SimpleNamespace(members=None)
    )


def log_of(folder, report_every: str = "1step", **options) -> Log:
    """Return the Log of a job with this output folder."""
    own = {"output_dir": str(folder), "report_every": interval(report_every)}
    return run_of(argparse.Namespace(**own | options)).log


def begin(log: Log, loader: StubLoader, step: int, total_steps: int, run: str = "") -> None:
    """Start a log as a Checkpointer does."""
    loader.step = step
    log.start(loader, step, total_steps, None, lambda: 0.1, None, run)


def make(
    args: argparse.Namespace,
    steps_per_epoch: int,
    fingerprint: str = "",
    total_steps: int | None = None,
    **objects: Any,
) -> Checkpointer:
    """Return a Checkpointer. args: output_dir, its options. objects: model, optimizer, scheduler, others."""
    loader = StubLoader(steps_per_epoch, fingerprint, total_steps)
    return Checkpointer(run_of(args), **{"scheduler": None} | objects, loader=loader)
