"""A start says how the one before it ended, and a run keeps the ends of all its starts in ends.jsonl."""

import json
import os
import re
import signal

import pytest

from common.run import ends
from launch.report import runs, tables
from tests.conftest import QUICK, finish, interrupt, names, processes_of, run, run_ranks, start_until
from tests.support.exact import changed

# 5 steps an epoch, 3 epochs
ONE = ("jobs/train.py", *QUICK, "--batch_size=240", "--epochs=3", "--report_every=1", "--save_every=2")
TWO = ("jobs/train_ddp.py", *ONE[1:])
BEFORE = "the end of [^:]*before: "


def ends_of(folder) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "ends.jsonl").read_text().splitlines()]
    return [line for line in lines if "code" in line]


def said(output: str) -> str:
    """Return what a start says about the one before; "" if it says nothing."""
    found = re.search(rf"^{BEFORE}(.*)$", output, re.MULTILINE)
    return found[1] if found else ""


def test_a_restart_says_how_the_start_before_ended(tmp_path):
    assert not said(interrupt(*ONE, f"--output_dir={tmp_path}", at=r"^epoch=1 step=3/", by=signal.SIGTERM))
    [end] = ends_of(tmp_path)
    assert (end["code"], end["reason"]) == (143, "SIGTERM") and 3 <= end["step"] < 15

    at = r"^epoch=\d step=\d+/15 .*loss="
    killed, output, _ = start_until(*ONE, f"--output_dir={tmp_path}", at=at)
    stopped_at = f"SIGTERM at step {end['step']} (exit code 143)"
    assert said(output) == stopped_at
    killed.kill()
    finish(killed, -signal.SIGKILL)

    assert said(run(*ONE, f"--output_dir={tmp_path}").stdout) == ends.KILLED
    begun = [json.loads(line)["time"] for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [line["start"] for line in ends_of(tmp_path)] == [begun[0], begun[2]]
    assert [(line["step"], line["reason"]) for line in ends_of(tmp_path)][1:] == [(15, "done")]
    column = [row[-1] for row in tables.make_start_rows([runs.read(str(tmp_path), "run")])]
    assert column == [stopped_at, ends.KILLED, "done"]
    assert not ends.describe_last(str(tmp_path)), "the run is done"


@pytest.mark.thorough
def test_an_error_is_told_to_the_next_start(tmp_path):
    options = (*ONE, f"--output_dir={tmp_path}", "--max_bad_steps=3")
    run(*options, "--lr=1e9", code=7)
    [end] = ends_of(tmp_path)
    assert end["code"] == 7 and names(end["reason"], "3 steps", "finite loss", "max_bad_steps")
    # one that ends before its first report is told as well, though starts.jsonl lacks it
    script = changed("train.py", tmp_path / "job.py", ("loss = criterion(logits, targets)", "loss = 1 / 0"))
    failed = run(script, *options[1:], code=1)
    assert said(failed.stdout) == f"{end['reason']} at step {end['step']} (exit code 7)"
    assert said(run(*options, "--lr=1e9", code=7).stdout) == (
        "ZeroDivisionError: division by zero at step 3 (exit code 1)"
    )


def test_ends_that_cannot_be_written_cost_no_other_report(tmp_path):
    (tmp_path / "ends.jsonl").mkdir(parents=True)
    printed = run(*ONE, "--epochs=1", f"--output_dir={tmp_path}").stdout
    assert "are incomplete" in printed
    assert len((tmp_path / "starts.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / "metrics.jsonl").exists()


def test_an_error_with_a_password_is_masked(tmp_path):
    (tmp_path / "starts.jsonl").write_text('{"time": 1.5, "step": 0, "settings": {}, "environment": {}}\n')
    ends.write(str(tmp_path), 3, *ends.of_error(OSError("no answer of https://me:hunter2@host/path")))
    [end] = ends_of(tmp_path)
    assert end["start"] == 1.5 and end["reason"].startswith("OSError: no answer of")
    assert "hunter2" not in str(end)


@pytest.mark.thorough
def test_a_lost_rank_is_told_to_the_next_start(tmp_path):
    words = (*TWO, "--processes_per_node=2", f"--output_dir={tmp_path}")
    job, _, continue_it = start_until(*words, at=r"^epoch=2 step=6/")
    os.kill(processes_of(job)[-1], signal.SIGKILL)
    continue_it()
    finish(job, 128 + signal.SIGKILL)
    line = said(run_ranks(*TWO, f"--output_dir={tmp_path}")[0].stdout)
    # the launcher may end rank 0 before it has written
    assert line == ends.KILLED or re.search(r"lost contact with another process: .* \(exit code 5\)$", line)


@pytest.mark.thorough
def test_a_run_without_a_record_of_its_ends(tmp_path):
    """Versions before 0.48 wrote none, and a file may be damaged."""
    run(*ONE, f"--output_dir={tmp_path}", "--epochs=1")
    (tmp_path / "ends.jsonl").write_bytes(b'\xff\n[]\n5\n{"start": "x"}\n{"start": 1, "rea')
    assert not said(run(*ONE, f"--output_dir={tmp_path}").stdout)
    assert b'\n{"start"' in (tmp_path / "ends.jsonl").read_bytes()
