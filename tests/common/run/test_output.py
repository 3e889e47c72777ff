"""One job at a time holds an output folder."""

import argparse
import contextlib
import errno
import fcntl
import math
import os
import re
import subprocess
import sys

import pytest

from bootfile.ground import folder_lock
from bootfile.ground.errors import BadInput
from common.checkpoint import resume
from common.run import output
from tests.conftest import ROOT, environment

# holds a folder; its forked child lives longer
HOLDER = """
import os, sys
from common.run import output
from common.checkpoint import resume
output.Output(sys.argv[1]).hold()
reader, writer = os.pipe()
if os.fork() == 0:
    print("held", flush=True)
    os.read(0, 1)
    os._exit(0)
os.read(reader, 1)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / "run"], cwd=ROOT, env=environment(), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.thorough
def test_a_lock_ends_with_its_job_and_not_with_its_children(holder, tmp_path, monkeypatch):
    folder = str(tmp_path / "run")
    monkeypatch.setattr(folder_lock, "_BUSY", 0.5)
    run = output.Output(folder)
    with pytest.raises(BadInput, match=f"{folder} belongs to another job"):
        run.hold()
    assert os.listdir(folder) == [".lock"]
    holder.kill()
    holder.wait()
    monkeypatch.setattr(folder_lock, "_BUSY", 10.0)
    run.hold()
    run.hold()  # this job has it already
    run.release()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EINVAL])
def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys, number):
    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    run = output.Output(str(tmp_path / "run"))
    for _ in range(2):
        run.hold()
    assert capsys.readouterr().out.count("warning: ") == 1
    run.release()
    assert os.listdir(tmp_path) == []


def test_links_that_are_not_permitted_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "PARENT", str(tmp_path))
    monkeypatch.setattr(os, "environ", {})
    path = output.make_default()
    for permitted in (False, True):
        with monkeypatch.context() as patch:
            if not permitted:
                patch.setattr(os, "symlink", _not_permitted)
            run = output.Output(path, is_default=True)
            run.hold()
            run.begin()
            run.release()
        assert os.path.lexists(tmp_path / "latest") == permitted
    assert os.readlink(tmp_path / "latest") == os.path.basename(path)


def test_latest_points_to_a_folder_that_the_parent_holds(tmp_path, monkeypatch):
    """An elastic job: its agent holds the folder, and rank 0, which writes the results, begins."""
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv(output.HELD, "1")
    run = output.Output(str(folder), is_default=True)
    run.hold()
    run.begin()
    assert os.readlink(tmp_path / "latest") == "run"


def _not_permitted(*arguments):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize(("wanted", "refused"), [("never", True), ("RUN/step_2.pt", True), ("auto", False)])
def test_results_at_a_url_are_not_replaced(tmp_path, wanted, refused):
    args, place = argparse.Namespace(resume=wanted), output.Output(str(tmp_path))
    expected = pytest.raises(BadInput, match=r"checkpoints/step_4\.pt, best\.pth")
    with expected if refused else contextlib.nullcontext():
        names = ["checkpoints/step_4.pt", "best.pth"]
        resume.refuse_results(args, place, lambda start: True, names)


@pytest.mark.parametrize(
    "variable, first",
    [
        ("SLURM_RESTART_COUNT", 0),
        ("TORCHELASTIC_RESTART_COUNT", 0),
        ("MA_SCHEDULE_CNT", 1),
        ("MA_PROC_START_CNT", 1),
    ],
)
def test_a_restart_that_finds_no_results(variable, first, tmp_path, monkeypatch, capsys):
    run, args = output.Output(str(tmp_path / "run")), argparse.Namespace(resume="auto")
    monkeypatch.setenv(variable, str(first))
    resume.take_output(args, run, lambda start: True)
    assert "warning" not in capsys.readouterr().out
    monkeypatch.setenv(variable, str(first + 2))
    resume.take_output(args, run, lambda start: True)
    warning = f"warning: restart 2 .*{run.folder} .*no results.* not mounted here"
    on = r" \(this folder is on \w\S* at /\S*\)" if os.path.exists("/proc/self/mountinfo") else ""
    assert re.search(f"{warning}{on}$", capsys.readouterr().out, re.MULTILINE)
    (tmp_path / "run/starts.jsonl").write_text('{"step": 0, "settings": {}, "environment": {}}\n')
    resume.take_output(args, run, lambda start: True)
    assert "warning" not in capsys.readouterr().out


def test_the_results_of_a_folder(tmp_path):
    """A run that was killed in its first report has only a receipt, and no results."""
    folder = str(tmp_path)
    assert output.list_results(folder) == [] and output.epochs(folder) == []
    for name in ("receipt.bin", "starts.jsonl", "classes.json"):
        (tmp_path / name).write_text("x")
    (tmp_path / "metrics.jsonl").touch()
    assert output.list_results(folder) == []
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert output.list_results(folder) == ["metrics.jsonl", "receipt.bin"]
    (tmp_path / "best.pth").touch()
    assert output.epochs(folder) == [math.inf]
    for epoch in (2, 10):
        (tmp_path / f"epoch_{epoch}.pth").touch()
    assert sorted(output.epochs(folder)) == [2, 10]
    assert output.list_results(folder)[:3] == ["best.pth", "epoch_10.pth", "epoch_2.pth"]
