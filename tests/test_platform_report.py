"""A report of a platform has the results of its parts, and nothing that names the machine or its user."""

import getpass
import json
import os
import re
import socket

import pytest

from tests.conftest import ROOT, environment, finish, free_port, run, start
from tests.real import report

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


def start_nodes(folder, **more):
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
        options = (f"--output={folder / f'report-{rank}.json'}", *more.get("options", ()))
        env = environment(**shared, **own)
        jobs.append(start("-m", "tests.real.report", *options, env=env, fresh=True))
    return jobs


def check_privacy(text, folder):
    for name in (str(folder), str(ROOT), SECRET, os.path.expanduser("~"), "127.0.0.1"):
        assert name not in text
    for word in (getpass.getuser(), socket.gethostname()):
        assert not re.search(rf"\b{re.escape(word)}\b", text)
    assert not re.search(r'"[^"]*\s/|/tmp|@', text)


@pytest.mark.faults
def test_two_nodes_report(tmp_path):
    jobs = start_nodes(tmp_path)
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
    parts = {part["part"]: part for part in found["parts"]}
    assert list(parts) == ["start", "restart after SIGTERM", "rate", "one process", "rate of one process"]
    assert all(part["passed"] for part in parts.values())
    assert parts["restart after SIGTERM"]["exit_codes"] == [143, 0]
    states = {parts[name]["state"] for name in ("start", "restart after SIGTERM", "one process")}
    assert len(states) == 1 and parts["rate"]["images_per_s"] > 0
    check_privacy(text, tmp_path)


@pytest.mark.faults
def test_a_part_that_fails_is_in_the_report(tmp_path):
    """The time limit is shorter than a start."""
    jobs = start_nodes(tmp_path, options=("--minutes=0.02",))
    assert [finish(job, None).returncode for job in jobs] == [1, 1]
    text = (tmp_path / "report-0.json").read_text()
    assert {part["failed"] for part in json.loads(text)["parts"]} == {"no end within the time limit"}
    check_privacy(text, tmp_path)
