"""A report of a platform has the results of its parts, and nothing that names the machine or its user."""

import argparse
import getpass
import json
import os
import re
import socket

import pytest

from common.platform.topology import Topology
from tests.conftest import ROOT, environment, finish, free_port, run, start
from tests.real import report

SCRIPT = ROOT / "tests/real/report.py"
SECRET = "hf_Zk3vQx81sL"
LOG = f"""
preflight ok: outputs at /home/ann/runs on node-17.example.org
Traceback (most recent call last):
  File "{ROOT}/common/distributed/entry.py", line 55, in run
    main()
  File "/home/ann/private/model.py", line 12, in forward
    raise RuntimeError("token {SECRET}")
torch.distributed.DistBackendError: NCCL error at node-17.example.org: {SECRET}
"""


def test_an_error_has_its_class_and_our_lines_only():
    assert report.explain(LOG) == {"kind": "DistBackendError", "places": ["common/distributed/entry.py:55"]}
    line = f"error: s3://key:{SECRET}@bucket/: no such folder\n"
    assert report.explain(line) == {"kind": "one line", "places": []}
    assert report.explain("killed") == {"kind": "", "places": []}


def test_a_folder_that_does_not_exist_is_one_line(tmp_path):
    result = run("-m", "tests.real.report", f"--output={tmp_path}/none/report.json", code=2)
    assert result.stderr.startswith("error: --output ") and result.stderr.count("\n") == 1


def start_nodes(folder, script, *options):
    """Start the report on two nodes, as a launcher of processes does, each with its own temporary folder."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "API_TOKEN": SECRET,
    }
    jobs = []
    for rank in range(2):
        (folder / str(rank)).mkdir()
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "TMPDIR": str(folder / str(rank)),
        }
        output = f"--output={folder / f'report-{rank}.json'}"
        env = environment(**shared, **own)
        # a platform starts the boot file in any folder
        jobs.append(start(script, output, *options, env=env, fresh=True, cwd=folder))
    return jobs


def check_privacy(text, folder):
    for name in (str(folder), str(ROOT), SECRET, os.path.expanduser("~"), "127.0.0.1"):
        assert name not in text
    for word in (getpass.getuser(), socket.gethostname()):
        assert not re.search(rf"\b{re.escape(word)}\b", text)
    assert not re.search(r'"[^"]*\s/|/tmp|@', text)


def test_options_that_a_platform_adds_are_ignored(tmp_path):
    """As a job does: in a file that is started with them, and not without a platform."""
    output = f"--output={tmp_path / 'none' / 'report.json'}"
    ignored = run(SCRIPT, "--data_url=x", "--num_gpus=1", output, code=2, cwd=tmp_path)
    assert ignored.stderr.startswith("error: --output ") and "--data_url" in ignored.stdout
    refused = run(SCRIPT, "--data_url=x", output, code=2, cwd=tmp_path)
    assert refused.stderr.startswith("error: unknown option: --data_url")


def test_a_folder_gets_the_report_with_its_usual_name(tmp_path):
    """A platform that passes the folder of an output as a hyperparameter."""
    args = argparse.Namespace(output=str(tmp_path))
    assert report._find_output(args) == {"output": str(tmp_path / "bootfile-report.json")}


def test_the_driver_of_the_gpu_and_the_backend_are_in_the_report(monkeypatch, tmp_path):
    monkeypatch.setattr(report.node, "find_driver", lambda: "580.159.04")
    written = make_report(tmp_path)
    written.write()
    machine = json.loads((tmp_path / "report.json").read_text())["machine"]
    assert machine["driver"] == "580.159.04" and machine["backend"] is None


def make_report(folder, minutes=10):
    args = argparse.Namespace(enable_gpu=False, minutes=minutes, output=str(folder / "report.json"))
    return report.Report(args, Topology(0, 2, 1, 0, None, None, "process", "launcher"), str(folder))


def test_figures_are_compared_with_those_of_another_part(tmp_path):
    written = make_report(tmp_path)
    written.parts = [{"part": "one", "receipt": "a", "first_loss": 2.0}]
    written.compare({"receipt": "a"}, "one", "receipt")
    written.compare_loss({"first_loss": 2.0005}, "one")
    with pytest.raises(report.Failed, match=r"receipt .*not .* one"):
        written.compare({"receipt": "b"}, "one", "receipt")
    with pytest.raises(report.Failed, match=r"first loss .*not .* one"):
        written.compare_loss({"first_loss": 2.0016}, "one")
    with pytest.raises(report.Failed, match="two did not run"):
        written.compare({"receipt": "a"}, "two", "receipt")


def test_after_the_time_limit_no_part_starts(tmp_path):
    """To end a job takes up to two times the grace, so the last one starts before that."""
    started = []
    for minutes in (2 * report._GRACE / 60, 0.01):
        written = make_report(tmp_path, minutes)
        written.take("late", started.append)
        assert [part["failed"] for part in written.parts] == ["no time is left"] and not started


@pytest.mark.thorough
def test_two_nodes_report_from_the_folder_that_pack_writes(tmp_path):
    run("-m", "launch", "pack", "tests/real/report.py", "--to", tmp_path / "packed")
    (packed,) = (tmp_path / "packed").iterdir()
    assert [path.name for path in (packed / "tests").rglob("*.py")] == ["report.py"]
    assert re.search("^scikit-learn", (packed / "pip-requirements.txt").read_text(), re.MULTILINE)
    jobs = start_nodes(tmp_path, packed / "tests/real/report.py", "--data_url=x", "--num_gpus=1")
    printed = [finish(job, None, timeout=900) for job in jobs]
    text = (tmp_path / "report-0.json").read_text()
    found = json.loads(text)
    assert [job.returncode for job in printed] == [0, 0], (text, printed)
    assert not (tmp_path / "report-1.json").exists()
    assert found["launcher"] == {
        "source": "launcher",
        "level": "process",
        "nodes": 2,
        "processes_per_node": 1,
    }
    assert found["machine"]["backend"] == "gloo"
    parts = {part["part"]: part for part in found["parts"]}
    ddp = "DistributedDataParallel"
    assert list(parts) == [
        "start", "restart after SIGTERM", ddp, "rate", "one process", f"{ddp} of one process",
        "rate of one process",
    ]  # fmt: skip
    assert all(part["passed"] for part in parts.values())
    assert parts["restart after SIGTERM"]["exit_codes"] == [143, 0]
    states = {parts[name]["state"] for name in ("start", "restart after SIGTERM", "one process")}
    assert len(states) == 1 and parts["rate"]["images_per_s"] > 0
    assert parts[ddp]["receipt"] == parts[f"{ddp} of one process"]["receipt"] != parts["start"]["receipt"]
    check_privacy(text, tmp_path)


@pytest.mark.thorough
def test_a_part_that_fails_is_in_the_report(tmp_path):
    """The time limit leaves a second for the first start, and none for the others."""
    seconds = 2 * report._GRACE + 1
    jobs = start_nodes(tmp_path, SCRIPT, f"--minutes={seconds / 60}")
    assert [finish(job, None).returncode for job in jobs] == [1, 1]
    text = (tmp_path / "report-0.json").read_text()
    first, *others = json.loads(text)["parts"]
    assert "time limit" in first["failed"] and len(others) == 6
    assert {part["failed"] for part in others} == {"no time is left"}
    assert sum(part["seconds"] for part in (first, *others)) < seconds
    check_privacy(text, tmp_path)
