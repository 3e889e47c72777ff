"""A run resumes with a damaged or strange file of a log."""

import json
import os
import re
import shutil

import pytest
import torch

from bootfile.exact import choose
from bootfile.exact import files as checkpoint
from bootfile.ground.errors import BadInput
from tests.support.checkpointers import StubLoader, begin, log_of
from tests.support.exact import is_whole


def _resumed(folder, step=2):
    """Resume a run after `step`, and report the next step."""
    log, loader = log_of(folder), StubLoader(10)
    loader.commit = lambda *_: None
    begin(log, loader, step, 10)
    loader.step += 1
    sums = torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64)
    log.report(sums, None)


def test_lines_that_cannot_be_read_do_not_end_the_record(tmp_path):
    line = '{"step": %d, "loss": 1, "time": 1}'
    path = tmp_path / "metrics.jsonl"
    damaged = [
        b'{"step": 1, "\xff',
        b"[" * 100_000,
        b'{"step": 1' + b"0" * 5000 + b"}",
        b"5",
        b'{"step": "x"}',
    ]
    first, second, last = ((line % step).encode() for step in (1, 2, 7))
    path.write_bytes(b"\n".join([first, *damaged, second, last, b"{"]))
    before = path.stat().st_ino
    _resumed(tmp_path)
    assert [json.loads(each)["step"] for each in path.read_text().splitlines()] == [1, 2, 3]
    assert json.loads((tmp_path / "starts.jsonl").read_text())["lost"] == {"step": 7, "time": 1}
    assert path.stat().st_ino != before and not list(tmp_path.glob("*partial*")), (
        "a new file is written, then renamed"
    )


@pytest.mark.parametrize("name", ["metrics.jsonl", "starts.jsonl"])
def test_a_fifo_does_not_hang_a_report(name, tmp_path, capsys):
    os.mkfifo(tmp_path / name)
    _resumed(tmp_path)
    printed = capsys.readouterr().out
    assert "are incomplete" in printed and "step=3" in printed


@pytest.mark.parametrize("name", ["step_2.pt", "step_2.pt.json"])
def test_a_fifo_among_checkpoints_is_passed_over(name, tmp_path):
    checkpoint.write(str(tmp_path / "step_1.pt"), {"a": 1}, step=1, run="r")
    checkpoint.write(str(tmp_path / "step_2.pt"), {"a": 1}, step=2, run="r")
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    path, _ = choose.choose("auto", str(tmp_path), lambda state: None)
    assert os.path.basename(path) == "step_1.pt"


def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(tmp_path, capsys):
    """It was chosen by its name, at each restart, and counted as the newest one to keep."""
    for step in (1, 2):
        checkpoint.write(str(tmp_path / f"step_{step}.pt"), {"a": step}, step=step, run="r")
    for name in ("step_20.pt", "7.pt"):
        shutil.copy(tmp_path / "step_1.pt", tmp_path / name)
        shutil.copy(tmp_path / "step_1.pt.json", tmp_path / f"{name}.json")
    path, _ = choose.choose("auto", str(tmp_path), lambda state: None)
    assert os.path.basename(path) == "step_2.pt"
    assert re.search(r"step_20\.pt: .*step 1, not .*step 20\b", capsys.readouterr().out)
    with pytest.raises(BadInput, match=r"step 1, not .*step 20\b"):
        choose.choose(str(tmp_path / "step_20.pt"), "", lambda state: None)
    path, _ = choose.choose(str(tmp_path / "7.pt"), "", lambda state: None)
    assert os.path.basename(path) == "7.pt", "a name without a step"
    checkpoint.write(str(tmp_path / "step_3.pt"), {"a": 3}, step=3, run="r")
    checkpoint.keep(str(tmp_path / "step_3.pt"), 2, is_whole)
    assert {path.name for path in tmp_path.glob("step_*.pt")} == {"step_2.pt", "step_3.pt"}


def test_reports_are_whole_if_the_names_of_classes_cannot_be_written(tmp_path, capsys):
    for name in ("classes.json", "confusion.json"):
        (tmp_path / name).mkdir()
    log, loader = log_of(tmp_path), StubLoader(10)
    log._files.class_names = ("cat", "dog")
    loader.commit = lambda *_: None
    begin(log, loader, 0, 10)
    for _ in range(2):
        loader.step += 1
        log.report(torch.ones(3, dtype=torch.float64), None)
        log._files.write_confusion(loader.step, {"matrix": torch.eye(2), "count": [1, 1]})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [1, 2]
    assert len((tmp_path / "starts.jsonl").read_text().splitlines()) == 1
    assert capsys.readouterr().out.count("are incomplete: Is a directory: ") == 2, "once for each file"


def test_reports_are_whole_if_no_line_of_the_starts_can_be_read(tmp_path, capsys):
    """starts.jsonl is larger than any file of starts."""
    (tmp_path / "starts.jsonl").touch()
    os.truncate(tmp_path / "starts.jsonl", 2**26)
    _resumed(tmp_path)
    assert "are incomplete" not in capsys.readouterr().out
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [3]
    with open(tmp_path / "starts.jsonl", "rb") as file:
        file.seek(2**26)
        assert len(file.read().splitlines()) == 2, "one line, after the one that was cut"
