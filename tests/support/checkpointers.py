"""Make a Checkpointer without a job."""

import argparse
from types import SimpleNamespace

import torch

from common.checkpoint.checkpointer import Checkpointer
from common.console.arguments import Interval, interval
from common.run.metrics import Log
from common.run.output import Output
from datasets.sampling.receipt import Receipt

DEFAULTS = {
    "weights": None, "evaluate": False, "evaluate_every": 0, "epoch_weights": True, "ignored": (),
    "report_every": Interval(1_000_000, "step"),
}  # fmt: skip


class StubLoader:
    """The parts of a training loader that a Checkpointer and a Log use."""

    def __init__(self, steps_per_epoch: int, fingerprint: str = ""):
        self.receipt, self.waited = Receipt(fingerprint), 0.0
        self.plan = SimpleNamespace(index=SimpleNamespace())
        self._steps_per_epoch, self.collate_fn = steps_per_epoch, None

    def __len__(self):
        return self._steps_per_epoch

    def lead(self, step, part):
        pass

    def call_when_stopped(self, save):
        pass

    def check(self, step):
        pass

    def add_generator(self, value):
        return False

    def find_unknown_generators(self, parts, saved):
        return []

    def commit(self, step, folder):
        self.receipt.chain(step, len(self), self.receipt.take(), folder)


def log_of(folder, report_every: str = "1step") -> Log:
    """Return the Log of a job with this output folder."""
    args = argparse.Namespace(
        **DEFAULTS | {"report_every": interval(report_every), "output": Output(str(folder))}
    )
    log = Log(args)
    log.optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    return log


def make(args: argparse.Namespace, steps_per_epoch: int, fingerprint: str = "", **objects) -> Checkpointer:
    """Return a Checkpointer. args: output_dir, its options. objects: model, optimizer, scheduler, others."""
    for name, value in DEFAULTS.items():
        if not hasattr(args, name):
            setattr(args, name, value)
    args.output = Output(args.output_dir)
    loader = StubLoader(steps_per_epoch, fingerprint)
    return Checkpointer(args, Log(args), **{"scheduler": None} | objects, loader=loader)
