"""A start says how the one before it ended, a run keeps the ends of all its starts in ends.jsonl, and the
lines of a log tell a watcher how a run is (guides/log_format.md)."""

import json
import os
import re
import signal
import subprocess

import pytest

from bootfile.ground.log_lines import END, PROGRESS
from common.run import starts
from launch.report import runs, tables
from tests.conftest import QUICK, ROOT, finish, interrupt, names, processes_of, run, run_ranks, start_until
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


def blocks_of_the_page() -> list[str]:
    """Return the two patterns of guides/log_format.md."""
    page = (ROOT / "guides" / "log_format.md").read_text(encoding="utf-8")
    return re.findall(r"^```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def watch(log) -> str:
    """Return what the watcher of the page says of a log."""
    script = ROOT / "guides" / "log_format" / "watch.sh"
    return subprocess.run(["sh", script, log], capture_output=True, text=True).stdout.strip()


def watch_text(log, text: str) -> str:
    log.write_text(text)
    return watch(log)


def ends_in(text: str) -> list[dict[str, str]]:
    """Return the named parts that END finds in each line."""
    found = [END.match(line) for line in text.splitlines()]
    return [{name: part for name, part in end.groupdict().items() if part} for end in found if end]


def test_the_page_shows_the_patterns():
    progress, end = (block.replace("\n", "") for block in blocks_of_the_page())
    assert (progress, end) == (PROGRESS.pattern, END.pattern)


LINES = [  # a line that another launcher prints, or a loop with Exact, and what END finds in it
    ("[default1]:error: no data", {"error": "error: no data"}),
    ("main.py: error: no data", {"error": "main.py: error: no data"}),
    ("ValueError: no data", {"error": "ValueError: no data"}),
    ("torch.cuda.OutOfMemoryError: x", {"error": "torch.cuda.OutOfMemoryError: x"}),
    ("rank 3 on node b (pid 12) was killed by SIGKILL: the kernel's OOM killer", {"lost": "3"}),
    ("rank 3 (pid 12) ended with exit code 1", {"lost": "3"}),
    ("the end of the training before: SIGTERM at step 3 (exit code 143)", None),
    ("ranks 2-3, 5 on node b have ended, or cannot be reached: see the launcher's log", {"lost": "2"}),
    ("AssertionError", {"error": "AssertionError"}),
    ("rank 3 waits", None),
    ("rank 3: epoch 1 ended with loss 0.3", None),
    ("rank 3 on node b is gone: it was killed by SIGKILL", None),
    ("no error: all is well", None),
]


@pytest.mark.parametrize(("line", "found"), LINES)
def test_what_an_end_is(line, found):
    assert ends_in(line) == ([found] if found else [])


WATCHED = [  # the last line of a log, and what the watcher says
    ("[default0]:epoch=1 step=3/15", "it moves"),
    ("rank 1 (node b) is not slow any more after step 2", "it moves"),
    ("ranks 2-3 on node b have ended, or cannot be reached: see the launcher's log", "start it again"),
    ("end: SIGINT at step 3/15, exit code 130", "a person stopped it"),
    ("end: error: not uploaded at step 3/15, exit code 6", "start it again"),
    ("error: unknown option: --no_such", "no progress: read"),
]


@pytest.mark.parametrize(("line", "said"), WATCHED)
def test_what_the_watcher_says(line, said, tmp_path):
    assert watch_text(tmp_path / "log", f"epoch=1 step=2/15 loss=1\n{line}\n").startswith(said)


def test_a_restart_says_how_the_start_before_ended(tmp_path):
    stopped = interrupt(*ONE, f"--output_dir={tmp_path}", at=r"^epoch=1 step=3/", by=signal.SIGTERM)
    assert not said(stopped) and watch_text(tmp_path / "log", stopped) == "start it again"
    [end] = ends_of(tmp_path)
    assert (end["code"], end["reason"]) == (143, "SIGTERM") and 3 <= end["step"] < 15
    step = str(end["step"])
    assert ends_in(stopped) == [
        {"stopped": step, "saved": step}, {"reason": "SIGTERM", "step": step, "steps": "15", "code": "143"}
    ]  # fmt: skip
    assert END.match(stopped.splitlines()[-1])

    at = r"^epoch=\d step=\d+/15 .*loss="
    killed, output, _ = start_until(*ONE, f"--output_dir={tmp_path}", at=at)
    stopped_at = f"SIGTERM at step {end['step']} (exit code 143)"
    assert said(output) == stopped_at
    killed.kill()
    finish(killed, -signal.SIGKILL)
    assert watch_text(tmp_path / "log", output) == "it moves" and not ends_in(output)
    os.utime(tmp_path / "log", (0, 0))
    assert watch(tmp_path / "log") == "silent"

    done = run(*ONE, f"--output_dir={tmp_path}").stdout
    assert said(done) == starts.KILLED
    assert watch_text(tmp_path / "log", done) == "finished" and END.match(done.splitlines()[-1])
    assert ends_in(done) == [{"reason": "finished", "step": "15", "steps": "15", "code": "0"}]
    *_, last = (progress for progress in map(PROGRESS.match, done.splitlines()) if progress)
    assert last["epoch"] == "3" and (last["step"], last["steps"]) == ("15", "15")
    assert last["time"] and last["eta"] and last["figures"].startswith(" val_loss=")
    assert last[0] == last.string, "no figure is missing"
    begun = [json.loads(line)["time"] for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [line["start"] for line in ends_of(tmp_path)] == [begun[0], begun[2]]
    assert [(line["step"], line["reason"]) for line in ends_of(tmp_path)][1:] == [(15, "done")]
    column = [row[-1] for row in tables.make_start_rows([runs.read(str(tmp_path), "run")])]
    assert column == [stopped_at, starts.KILLED, "done"]
    assert not starts.describe_last_end(str(tmp_path)), "the run is done"


@pytest.mark.thorough
def test_an_error_is_told_to_the_next_start(tmp_path):
    options = (*ONE, f"--output_dir={tmp_path}", "--max_bad_steps=3")
    diverged = run(*options, "--lr=1e9", code=7)
    [end] = ends_of(tmp_path)
    assert ends_in(diverged.stdout)[-1] == {
        "reason": end["reason"], "step": str(end["step"]), "steps": "15", "code": "7"
    }  # fmt: skip
    assert watch_text(tmp_path / "log", diverged.stdout + diverged.stderr).startswith("no progress: read ")
    assert end["code"] == 7 and names(end["reason"], "3 steps", "finite loss", "max_bad_steps")
    # one that ends before its first report is told as well, though starts.jsonl lacks it
    script = changed("train.py", tmp_path / "job.py", ("loss = criterion(logits, targets)", "loss = 1 / 0"))
    failed = run(script, *options[1:], code=1)
    assert said(failed.stdout) == f"{end['reason']} at step {end['step']} (exit code 7)"
    assert ends_in(failed.stdout)[-1]["code"] == "1"
    assert ends_in(failed.stderr) == [{"error": "ZeroDivisionError: division by zero"}]
    refused = run("jobs/train.py", "--no_such=1", code=2)
    assert ends_in(refused.stdout + refused.stderr)[-1]["error"].startswith(
        "error: unknown option: --no_such"
    )
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
    starts.write_end(
        str(tmp_path), 1.5, 3, *starts.end_of_error(OSError("no answer of https://me:hunter2@host/path"))
    )
    [end] = ends_of(tmp_path)
    assert end["start"] == 1.5 and end["reason"].startswith("OSError: no answer of")
    assert "hunter2" not in str(end)


@pytest.mark.parametrize("code, recorded", [(3, 3), (-1, 255), (256, 1), ("a text", 1)])
def test_an_exit_with_an_error_is_not_recorded_as_done(code, recorded):
    assert starts.end_of_error(SystemExit(code)) == (recorded, f"sys.exit({code!r})")


@pytest.mark.thorough
def test_a_lost_rank_is_told_to_the_next_start(tmp_path):
    words = (*TWO, "--processes_per_node=2", f"--output_dir={tmp_path}")
    job, _, continue_it = start_until(*words, at=r"^epoch=2 step=6/")
    os.kill(processes_of(job)[-1], signal.SIGKILL)
    continue_it()
    lost = finish(job, 128 + signal.SIGKILL)
    assert {"lost": "1"} in ends_in(lost.stderr)
    assert watch_text(tmp_path / "log", lost.stdout + lost.stderr) == "start it again"
    line = said(run_ranks(*TWO, f"--output_dir={tmp_path}")[0].stdout)
    # the launcher may end rank 0 before it has written
    assert line == starts.KILLED or re.search(r"lost contact with another process: .* \(exit code 5\)$", line)


@pytest.mark.thorough
def test_a_run_without_a_record_of_its_ends(tmp_path):
    """Versions before 0.48 wrote none, and a file may be damaged."""
    run(*ONE, f"--output_dir={tmp_path}", "--epochs=1")
    (tmp_path / "ends.jsonl").write_bytes(b'\xff\n[]\n5\n{"start": "x"}\n{"start": 1, "rea')
    assert not said(run(*ONE, f"--output_dir={tmp_path}").stdout)
    assert b'\n{"start"' in (tmp_path / "ends.jsonl").read_bytes()
