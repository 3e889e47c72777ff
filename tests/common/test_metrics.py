"""What a job reports, without a job around it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launch.report import cli as report
from launch.report import runs as report_data
from tests.conftest import records
from tests.support.checkpointers import StubLoader, log_of


@pytest.mark.parametrize("correct", [6.0, torch.nan], ids=["classification", "regression"])
def test_figures_of_jobs_with_and_without_accuracy(tmp_path_factory, capsys, correct):
    """In lines, metrics.jsonl, TensorBoard, the last line and the page; never as 0 or NaN."""
    tmp_path = tmp_path_factory.mktemp("run")  # its name is on the page
    log, loader = log_of(tmp_path), StubLoader(4)
    log.start(loader, 0, 4)
    for step in (2, 4):
        loader.receipt.add(np.arange(8), np.zeros(8, np.int64))
        loader.receipt.add(np.arange(8), np.zeros(8, np.int64))
        sums = torch.tensor([12.0, correct, 8.0], dtype=torch.float64)
        log.step(step, sums.clone(), SimpleNamespace(get_last_lr=lambda: [0.1]))
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
