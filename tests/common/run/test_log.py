"""A Log reports the right figures. These tests start no job."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bootfile.machine.differences import in_words
from bootfile.processes import ranks
from common.run import environment
from launch.report import cli as report
from launch.report import runs as report_data
from tests.conftest import records
from tests.support.checkpointers import StubLoader, begin, log_of


@pytest.mark.parametrize("correct", [6.0, torch.nan], ids=["classification", "regression"])
def test_figures_of_jobs_with_and_without_accuracy(tmp_path_factory, capsys, correct):
    """They are in the lines, metrics.jsonl, TensorBoard and the page, and never 0 or NaN without a value."""
    tmp_path = tmp_path_factory.mktemp("run")  # its name is on the page
    log, loader = log_of(tmp_path), StubLoader(4)
    begin(log, loader, 0, 4)
    for loader.step in (2, 4):
        loader.receipt.add(np.arange(8), np.zeros(8, np.int64))
        loader.receipt.add(np.arange(8), np.zeros(8, np.int64))
        sums = torch.tensor([12.0, correct, 8.0], dtype=torch.float64)
        log.report(sums.clone(), None)
    log.validation(sums)
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


def test_the_first_lines_name_what_is_trained(tmp_path, monkeypatch):
    args = SimpleNamespace(arch="net", batch_size=16)
    model = torch.nn.Linear(3, 2)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    lines = environment.describe(args, model, autocast, 40, 10, ("s3://a", str(tmp_path)))
    assert lines[0] == "model net: 8 parameters, device cpu, precision bfloat16"
    threads = in_words("threads", torch.get_num_threads())
    assert lines[1] == f"global batch 16 = 1 process x 16, {threads}; 10 steps an epoch, 40 in all"
    monkeypatch.setattr(ranks, "world_size", lambda: 4)
    for backend, processes in (("gloo", "4 processes"), ("nccl", "4 GPUs")):
        monkeypatch.setattr(torch.distributed, "get_backend", lambda backend=backend: backend)
        of_several = environment.describe(args, model, autocast, 40, 10)[1]
        layout = f"batch 16 = {processes} x 4 (--batch_size 16/gpu: 16 each), {threads} each; 10 steps"
        assert layout in of_several
    monkeypatch.undo()
    assert lines[2].startswith("results in s3://a; ") and f"launch report {tmp_path}, or" in lines[2]
    lines = environment.describe(args, model, contextlib.nullcontext(), 40, 10)
    assert "device cpu, precision float32" in lines[0]
