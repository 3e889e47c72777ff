"""`launch receipt` compares the states of two runs, and names what differs and by how much."""

import json
import os
import re

import numpy as np
import pytest
import torch

from bootfile.exact import digest, files
from bootfile.receipt import compare
from bootfile.receipt.receipt import Receipt
from bootfile.records import STATES, cut_states, read_states, write_state
from tests.conftest import run


def _objects(step: int, change: float = 0.0) -> dict:
    weight = torch.arange(24.0).view(2, 3, 2, 2) + step
    momentum = torch.full((3,), 2.0)
    momentum[1] += change
    optimizer = {
        "state": {3: {"momentum_buffer": momentum}},
        "param_groups": [{"lr": 0.1 + step, "params": [3]}],
    }
    return {"model": {"conv.weight": weight}, "optimizer": optimizer, "receipt": {"digest": "x"}}


def _make(folder, processes=1, change=0.0, steps=(11, 22, 33), kept=(33,), **settings):
    """Write what a run of 33 steps leaves; its state at step 33 differs by `change`."""
    os.makedirs(folder / "checkpoints")
    data = Receipt()
    for step in range(1, 34):
        data.add(np.arange(step, step + 4), np.arange(4), ())
    data.chain(33, 11, data.take(), str(folder))
    for step in steps:
        objects = _objects(step, change if step == 33 else 0.0)
        write_state(str(folder), digest.summarize(step, objects) | {"planned": True})
        if step in kept:
            files.write(str(folder / "checkpoints" / f"step_{step}.pt"), {"objects": objects}, step=step)
    start = {"step": 0, "settings": {"seed": 0} | settings, "environment": {"world size": processes}}
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    return folder


def _receipt(*runs, code):
    return run("-m", "launch", "receipt", *runs, code=code).stdout.splitlines()[2:]


def test_states_are_compared_where_both_runs_have_them(tmp_path):
    whole = _make(tmp_path / "whole")
    data = "data equal for 33 steps: the same ids, labels and augmentation"
    other = _make(tmp_path / "other", steps=(4, 11, 33))
    assert _receipt(whole, other, code=0) == [data, "state equal at steps 11, 33"]
    changed = _make(tmp_path / "changed", change=2e-3)
    text = "state equal at steps 11, 22; differs at 33: optimizer.state.3.momentum_buffer"
    assert _receipt(whole, changed, code=1) == [data, f"{text} (largest relative difference 0.001)"]
    deleted = _make(tmp_path / "deleted", change=2e-3, kept=())
    assert _receipt(whole, deleted, code=1)[1].startswith(f"{text} (")
    shared = _make(tmp_path / "shared", processes=2, change=2e-3)
    assert "expected: 1 and 2 processes " in _receipt(whole, shared, code=0)[1]
    exact = [_make(tmp_path / f"exact{each}", each, (each - 1) * 2e-3, exact_shards=8) for each in (1, 2)]
    assert _receipt(*exact, code=1)[1] == f"{text} (largest relative difference 0.001)"
    assert "; expected: " in _receipt(_make(tmp_path / "of 4", exact_shards=4), exact[1], code=0)[1]
    equal = [_make(tmp_path / f"equal{each}", each, exact_shards=8) for each in (1, 2)]
    for folder, loss in zip(equal, (0.5, 0.25), strict=True):
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 22, "val_loss": loss, "time": loss}) + "\n")
    text = "state equal at steps 11, 22, 33; val_loss differs at step 22: 0.5 and 0.25"
    assert _receipt(*equal, code=1)[1] == text and _receipt(equal[0], equal[0], code=0)
    seeded = _make(tmp_path / "seeded", seed=1)
    refused = run("-m", "launch", "receipt", whole, seeded, code=2).stderr
    assert re.fullmatch("error: .*seeds 0 and 1: .*\n", refused)
    older = _make(tmp_path / "older", steps=())
    assert _receipt(whole, older, code=0)[1].startswith("state not compared: ")


def test_the_report_compares_the_states_too(tmp_path):
    """guides/receipts.md: `report` shows both lines. Runs with other weights are not only called equal."""
    folders = [_make(tmp_path / "whole"), _make(tmp_path / "changed", change=2e-3), _make(tmp_path / "other")]
    damaged = _make(tmp_path / "damaged")
    (damaged / STATES).write_text("{")
    texts = []
    for folder in folders[1:]:
        texts.append(_receipt(folders[0], folder, code=int(folder.name == "changed")))
    run("-m", "launch", "report", *folders, damaged, "--to", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for data, state in texts:
        assert data.removeprefix("data ") in page and state.removeprefix("state ") in page
    assert "differs at 33: optimizer.state.3.momentum_buffer" in page


@pytest.mark.parametrize("name", [STATES, "starts.jsonl", "receipt.bin"])
@pytest.mark.parametrize("end", [b"[", b"[1]", b"[" * 100_000, b"\0\xff"])
def test_a_damaged_file_is_one_error(tmp_path, name, end):
    whole, damaged = _make(tmp_path / "whole"), _make(tmp_path / "damaged")
    with open(damaged / name, "ab") as file:
        file.write(end)
    refused = run("-m", "launch", "receipt", whole, damaged, code=2).stderr
    assert refused.startswith(f"error: {damaged / name}") and refused.count("\n") == 1


def test_the_numbers_of_parameter_groups(tmp_path):
    """Another learning rate is another state."""

    def line(folder, **group):
        objects = {"optimizer": {"state": {}, "param_groups": [{"params": [0], "foreach": None} | group]}}
        os.makedirs(folder, exist_ok=True)
        write_state(str(folder), digest.summarize(1, objects))

    line(tmp_path / "a", lr=0.1, betas=(0.9, 0.99))
    for name, lr, betas in (("b", 0.1, (0.9, 0.99)), ("c", 0.2, (0.9, 0.99)), ("d", 0.1, (0.9, 0.9))):
        line(tmp_path / name, lr=lr, betas=betas, foreach=True)
    first = str(tmp_path / "a")
    assert compare.compare_states(first, str(tmp_path / "b")) == (True, "equal at step 1")
    for name, part in (("c", "optimizer.param_groups.0.lr"), ("d", "optimizer.param_groups.0.betas.1")):
        equal, text = compare.compare_states(first, str(tmp_path / name))
        assert not equal and f"differs at 1: {part} " in text
    line(tmp_path / "e", lr=0.1, betas=(0.9, 0.99), nesterov=True)
    assert compare.compare_states(first, str(tmp_path / "e"))[1].startswith("differs at 1: ")


def test_the_order_of_the_objects_does_not_count():
    objects = _objects(1)
    assert digest.summarize(1, dict(reversed(objects.items()))) == digest.summarize(1, objects)


@pytest.mark.parametrize("lost", [0, 9])
def test_a_resumed_run_replaces_later_lines(lost, tmp_path):
    """The last line may be cut."""
    folder = _make(tmp_path / "run")
    os.truncate(folder / STATES, os.path.getsize(folder / STATES) - lost)
    cut_states(str(folder), 22)
    assert list(read_states(str(folder), whole=True)) == [11, 22]
    write_state(str(folder), digest.summarize(22, _objects(5)))
    assert read_states(str(folder), whole=True)[22]["digest"] == digest.summarize(22, _objects(5))["digest"]
