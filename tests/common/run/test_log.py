"""A Log reports the right figures. These tests start no job."""

import contextlib
import datetime
import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bootfile.machine.differences import in_words
from bootfile.processes import ranks
from common.run import environment
from common.run.log import _short
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


def report_once(folder, total_steps, began=0.0):
    """Report step 250 of a run that was resumed at step 50, `began` seconds before."""
    log, loader = log_of(folder), StubLoader(100)
    begin(log, loader, 50, total_steps)
    log._began -= began
    loader.step = 250
    loader.receipt.add(np.arange(8), np.zeros(8, np.int64))
    log.report(torch.tensor([9.87654321, 6, 9], dtype=torch.float64), None)
    log.validation(torch.tensor([98765.4321, 600, 900], dtype=torch.float64))


def test_a_line_in_a_file_has_the_time_the_steps_and_the_time_left(tmp_path, capsys):
    before = datetime.datetime.now().replace(microsecond=0)
    report_once(tmp_path / "a", 8450, began=1000)
    after = datetime.datetime.now()
    line, validation = capsys.readouterr().out.splitlines()
    pattern = r"epoch=3 step=250/8450 time=(\S+) eta=(\d+):(\d\d):(\d\d) loss=1.097 acc=0.6667 lr=0.1 "
    found = re.match(pattern, line)
    assert before <= datetime.datetime.fromisoformat(found[1]) <= after
    eta = int(found[2]) * 3600 + int(found[3]) * 60 + int(found[4])
    # 200 steps took 1,000 s and what this test took; 8,200 steps are left
    assert 0 <= eta - 1000 * 8200 / 200 <= ((after - before).total_seconds() + 1) * 8200 / 200
    assert re.search(r" data_time=-?\d+\.\d\d compute_time=\d+\.\d\d memory_mb=\d+ receipt=\w{16}$", line)
    assert validation.endswith(" val_loss=109.7 val_acc=0.6667 val_count=900")
    report_once(tmp_path / "b", None)
    line, _ = capsys.readouterr().out.splitlines()
    assert line.startswith("epoch=3 step=250 time=") and "eta=" not in line, "the end is not known"
    kept, _ = records(tmp_path / "a")
    assert kept["loss"] == 9.87654321 / 9 and "eta" not in kept, "metrics.jsonl has all digits"


def test_a_line_on_a_terminal_fits(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    report_once(tmp_path, 8450)
    line, validation = capsys.readouterr().out.splitlines()
    assert line.startswith("epoch=3 step=250/8450 loss=1.097 acc=0.6667 lr=0.1 images_per_s=")
    assert len(line) <= 100 and not re.search("time=2|eta|memory|receipt|compute", line)
    assert validation == "epoch=3 step=250/8450 val_loss=109.7 val_acc=0.6667"
    log = log_of(tmp_path / "long")
    begin(log, StubLoader(100), 50, 8450)
    log.show(250, **{f"val_metric_{number}": number / 7 for number in range(9)})
    line = capsys.readouterr().out.rstrip("\n")
    assert 80 < len(line) <= 100 and line.endswith(" val_metric_3=0.4286")


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_restart_after_a_kill_has_each_report_once(tmp_path, capsys, is_lost):
    """is_lost: the receipt of the steps before was deleted."""
    state = None
    for first, steps in ((0, (2, 4)), (2, (4, 6))):
        log, loader = log_of(tmp_path), StubLoader(4)
        if state:
            loader.receipt.load_state_dict(state)
        begin(log, loader, first, 6)
        for loader.step in steps:
            for _ in range(2):
                loader.receipt.add(np.arange(8), np.zeros(8))
            log.report(torch.tensor([8.0 + first, 4.0, 8.0], dtype=torch.float64), None)
            state = state or loader.receipt.state_dict()
        # killed here: nothing is closed
        if is_lost and not first:
            (tmp_path / "receipt.bin").unlink()
    assert [(line["step"], line["loss"]) for line in records(tmp_path)] == [(2, 1), (4, 1.25), (6, 1.25)]
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(2, 1), (4, 1.25), (6, 1.25)]
    assert ("lacks 2 of the steps 1 to 2" in capsys.readouterr().out) == is_lost


class Texts(torch.utils.data.Dataset):
    """Three windows of 100 tokens."""

    unit = "tokens", 100

    def __len__(self):
        return 3

    def __getitem__(self, id):
        return id


def test_the_rate_and_the_parts_of_the_time(tmp_path, capsys):
    log, loader = log_of(tmp_path), StubLoader(4)
    begin(log, loader, 0, 4)
    log.print_data(Texts(), Texts())
    for loader.step, loader.waited in ((2, 4.0), (4, 5.0)):
        log._since -= 10  # seconds
        loader.receipt.add(np.arange(8), np.zeros(8))
        loader.receipt.add(np.arange(8), np.zeros(8))
        log.report(torch.tensor([1.0, math.nan, 8.0], dtype=torch.float64), None)
    lines = records(tmp_path)
    assert [line["data_time"] for line in lines] == [4, 1]
    for line in lines:
        assert line["data_time"] + line["compute_time"] == pytest.approx(10, abs=2)
        assert line["tokens_per_s"] == pytest.approx(800 / 10, rel=0.2)
    log._since -= 20
    for _ in range(2):  # the second one takes no time
        log.validation(torch.tensor([1.0, math.nan, 8.0], dtype=torch.float64))
    assert log._evaluating == pytest.approx(20, abs=5)
    assert "data train=3 test=3 source=Texts" in capsys.readouterr().out


def test_an_evaluation_alone_is_one_line_with_all_digits(tmp_path, capsys):
    log, loader = log_of(tmp_path / "run", evaluate=True), StubLoader(4)
    begin(log, loader, 4, 4)
    log.validation(torch.tensor([98765.4321, 600, 900], dtype=torch.float64))
    log.finish()
    assert capsys.readouterr().out == "val_loss=109.739 val_acc=0.666667 val_count=900\n"
    assert not (tmp_path / "run").exists()


def test_a_profile_is_the_time_between_two_reports(tmp_path, capsys):
    log, loader = log_of(tmp_path / "run", prof=2), StubLoader(4)
    begin(log, loader, 0, 4)
    for loader.step in (2, 4):
        log.report(torch.tensor([1.0, 4.0, 8.0], dtype=torch.float64), None)
        log._profiled[-1] += loader.step  # seconds
    assert log.profiled_seconds == pytest.approx(2, abs=0.5)
    log.finish()
    assert capsys.readouterr().out == "" and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("processes", "per_node", "nodes"), [(1, None, 1), (1, "1", 1), (8, "4", 2), (8, "8", 1)]
)
def test_the_nodes_of_a_run(monkeypatch, processes, per_node, nodes):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if per_node:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", per_node)
    monkeypatch.setattr(ranks, "world_size", lambda: processes)
    facts = environment.facts()
    assert (facts["nodes"], facts["world size"]) == (nodes, processes)
    assert facts["processes per node"] == int(per_node or 1)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("loss", 2.340871, "2.341"),
        ("loss", math.nan, "nan"),
        ("lr", 3e-7, "3e-07"),
        ("images_per_s", 6671.2, "6671"),
        ("images_per_s", 9.4231, "9.423"),
        ("loss", 1.2345e9, "1.234e+09"),
        ("compute_time", 1573.82345, "1573.82"),
        ("memory_mb", 867.164, "867"),
    ],
)
def test_digits_of_a_figure(name, value, shown):
    assert _short(name, value) == shown


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
