"""A Log reports the right figures. These tests start no job."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.distributed import ranks
from common.run import starts
from common.run.output import Output
from launch.report import cli as report
from launch.report import runs as report_data
from tests.conftest import records
from tests.support.checkpointers import StubLoader, log_of


@pytest.mark.parametrize("correct", [6.0, torch.nan], ids=["classification", "regression"])
def test_figures_of_jobs_with_and_without_accuracy(tmp_path_factory, capsys, correct):
    """They are in the lines, metrics.jsonl, TensorBoard and the page, and never 0 or NaN without a value."""
    tmp_path = tmp_path_factory.mktemp("run")  # its name is on the page
    log, loader = log_of(tmp_path), StubLoader(4)
    log.start(loader, 0, 4)
    for step in (2, 4):
        loader.receipt.add(np.arange(8), np.zeros(8, np.int64))
        loader.receipt.add(np.arange(8), np.zeros(8, np.int64))
        sums = torch.tensor([12.0, correct, 8.0], dtype=torch.float64)
        log.step(step, sums.clone(), None)
    log.validation(4, sums)
    log.finish()
    printed, lines = capsys.readouterr().out, records(tmp_path)
    page = report.render_page([report_data.read(str(tmp_path), "run")])
    assert [line["loss"] for line in lines[:2]] == [1.5, 1.5] and lines[2]["val_loss"] == 1.5
    scalars = set(EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"])
    assert {"loss", "val_loss"} <= scalars
    if correct == 6:
        assert (lines[0]["acc"], lines[2]["val_acc"]) == (0.75, 0.75) and "test_accuracy=0.7500 " in printed
        assert {"acc", "val_acc"} <= scalars and "ccuracy" in page
    else:
        assert not any({"acc", "val_acc"} & line.keys() for line in lines) and "test_loss=1.5 " in printed
        assert not {"acc", "val_acc"} & scalars and "acc=" not in printed
        assert "accuracy" not in printed and "ccuracy" not in page


def _reported(log, loader, seconds_of_a_step, steps, clock):
    """Return the steps after which a run reports, with a simulated clock."""
    reported = []
    for step in range(1, steps + 1):
        clock[0] += seconds_of_a_step
        log.is_late = log.asks_to_report()  # all ranks learn it in the same step
        if log.is_due(step):
            reported.append(step)
            sums = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
            log.step(step, sums, None)
    return reported


@pytest.mark.parametrize(
    ("every", "expected"),
    [("10s", [1, 5, 9, 12, 16]), ("5", [5, 10, 12, 15]), ("1epoch", [12])],
)
def test_reports_are_due_by_time_and_by_steps(tmp_path, monkeypatch, every, expected):
    clock = [1e9]
    monkeypatch.setattr("common.run.metrics.time.monotonic", lambda: clock[0])
    log, loader = log_of(tmp_path, every), StubLoader(12)
    log.start(loader, 0, 16)
    loader.commit = lambda *_: None
    assert _reported(log, loader, 2.5, 16, clock) == expected


def test_the_first_lines_name_what_is_trained(tmp_path, monkeypatch):
    args = SimpleNamespace(arch="net", batch_size=16, output=Output(str(tmp_path)))
    model = torch.nn.Linear(3, 2)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    lines = starts.describe(args, model, autocast, 40, 10)
    assert lines[0] == "model net: 8 parameters, device cpu, precision bfloat16"
    assert lines[1] == "global batch 16 = 1 process x 16; 10 steps an epoch, 40 in all"
    monkeypatch.setattr(ranks, "world_size", lambda: 4)
    for backend, processes in (("gloo", "4 processes"), ("nccl", "4 GPUs")):
        monkeypatch.setattr(torch.distributed, "get_backend", lambda backend=backend: backend)
        of_several = starts.describe(args, model, autocast, 40, 10)[1]
        assert f"batch 16 = {processes} x 4 (--batch_size_per_gpu 16: 16 each); 10 steps" in of_several
    monkeypatch.undo()
    assert f"tensorboard --logdir {tmp_path}" in lines[3] and f"launch report {tmp_path}" in lines[3]
    lines = starts.describe(args, model, contextlib.nullcontext(), 40, 10, torch.device("cuda"))
    assert "device cuda, precision float32" in lines[0]
