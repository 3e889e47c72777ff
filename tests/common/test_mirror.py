"""What a job writes is at its URL, and what is there is whole or not listed; against a real server."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from common import checkpoint, mirror, url_lease
from common.exits import BadInput
from tests.conftest import environment, finish, start
from tests.fault_proxy import FaultProxy
from tests.object_store_server import ObjectStoreServer

# saves steps 2, 4, ... for ever
JOB = """
import os, sys, time, torch
from common import checkpoint, mirror, url_lease
folder, url = sys.argv[1:]
os.makedirs(folder, exist_ok=True)
one = mirror.Mirror(folder, url)
one.open()
one.start(0)
os.makedirs(f"{folder}/checkpoints", exist_ok=True)
for step in range(2, 1000, 2):
    state = {"step": step, "x": torch.rand(9)}
    checkpoint.write(f"{folder}/checkpoints/step_{step}.pt", state, step=step, run="r")
    checkpoint.write_text(f"{folder}/checkpoints/latest", f"step_{step}.pt")
    print(f"saved {step}", flush=True)
    one.saved()
    time.sleep(0.3)
"""


class Gate(FaultProxy):
    """Holds what stores an object of this name back for good, from the given time on."""

    def __init__(self, target: int, name: str, times: int):
        super().__init__(target)
        self.name, self.times, self.seen = name, times, 0

    def plan(self, line: str):
        if line.startswith("PUT") and self.name in line:
            self.seen += 1
            if self.seen >= self.times:
                self.closed.wait(60)
        return super().plan(line)


@pytest.fixture(scope="module")
def server():
    with ObjectStoreServer("runs") as server:
        yield server


@pytest.fixture(autouse=True)
def here(server, monkeypatch):
    for name, value in (server.environment | {"BOOTFILE_STORE_ATTEMPTS": "2"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(url_lease, "RENEW", 0.3)
    monkeypatch.setattr(url_lease, "WATCH", 2.0)


class Job:
    """What a job does with its output folder."""

    def __init__(self, folder: Path, url: str, resume: str = "auto", keep: int = 2):
        self.folder, self.url = folder, url
        folder.mkdir(exist_ok=True)
        self.mirror = mirror.Mirror(str(folder), url)
        self.mirror.open(resume, keep)
        paths = checkpoint.found(str(folder / "checkpoints"))
        self.state = checkpoint.read(paths[0]) if paths else {"step": 0}
        self.step = self.state["step"] if resume == "auto" else 0
        self.mirror.start(self.step)

    def save(self, step: int, run: str = "r") -> str:
        """The new checkpoint's path; it has begun to be uploaded."""
        folder = self.folder / "checkpoints"
        folder.mkdir(exist_ok=True)
        path = str(folder / checkpoint.name_of(step))
        checkpoint.write(path, {"step": step, "x": torch.rand(1000)}, step=step, run=run)
        checkpoint.write_text(str(folder / "latest"), checkpoint.name_of(step))
        checkpoint.keep(str(folder), run, self.mirror.keep)
        self.mirror.saved()
        return path

    def uploaded(self, server, step: int) -> None:
        """Wait until the list at the URL names it."""
        deadline = time.monotonic() + 20
        while step not in steps(server, self.url):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def keys(server, url: str) -> list[str]:
    prefix = url.partition("://runs/")[2] + "/"
    found = server.client().list_objects(Bucket="runs", Prefix=prefix).get("Contents", [])
    return [entry["Key"].removeprefix(prefix) for entry in found]


def steps(server, url: str) -> list[int]:
    """Of the checkpoints that the list names."""
    if ".bootfile-outputs.json" not in keys(server, url):
        return []
    marker = json.loads(_read(server, url, ".bootfile-outputs.json"))
    return sorted(
        int(match[1]) for each in marker["files"] if (match := re.search(r"step_(\d+)\.pt$", each["path"]))
    )


def _read(server, url: str, key: str) -> bytes:
    name = f"{url.partition('://runs/')[2]}/{key}"
    return server.client().get_object(Bucket="runs", Key=name)["Body"].read()


def _write(server, url: str, key: str, content: bytes) -> None:
    server.client().put_object(Bucket="runs", Key=f"{url.partition('://runs/')[2]}/{key}", Body=content)


def test_results_are_at_the_url_and_come_back(server, tmp_path):
    job = Job(tmp_path / "one", "s3://runs/whole")
    for step in (2, 4, 6):
        content = Path(job.save(step)).read_bytes()
        job.uploaded(server, step)
    (tmp_path / "one" / "metrics.jsonl").write_text('{"step": 6}\n')
    (tmp_path / "one" / "index").mkdir()
    (tmp_path / "one" / "index" / "large").write_text("stays on the node")
    assert job.mirror.finish() == ""
    assert keys(server, job.url) == [
        ".bootfile-outputs.json", "checkpoints/latest", "checkpoints/step_4.pt", "checkpoints/step_4.pt.json",
        "checkpoints/step_6.pt", "checkpoints/step_6.pt.json", "metrics.jsonl",
    ]  # fmt: skip
    marker = json.loads(_read(server, job.url, ".bootfile-outputs.json"))
    assert marker["step"] == 6 and {each["path"] for each in marker["files"]} == set(
        keys(server, job.url)[1:]
    )

    other = Job(tmp_path / "two", job.url)
    assert other.step == 6 and checkpoint.found(str(tmp_path / "two" / "checkpoints")) == [
        str(tmp_path / "two" / "checkpoints" / "step_6.pt")
    ]
    assert (tmp_path / "two" / "checkpoints" / "step_6.pt").read_bytes() == content
    assert (tmp_path / "two" / "metrics.jsonl").read_text() == '{"step": 6}\n'
    other.save(8)
    assert other.mirror.finish() == "" and steps(server, job.url) == [6, 8]


def test_what_lies_on_the_node_is_taken_where_it_is_as_new(server, tmp_path, capsys):
    url = "s3://runs/places"
    first = Job(tmp_path / "one", url)
    first.save(2)
    first.mirror.finish()
    second = Job(tmp_path / "two", url)
    second.save(4)
    second.mirror.finish()
    again = Job(tmp_path / "one", url)  # an older copy of its own lies there
    assert again.step == 4 and "restored step_4.pt" in capsys.readouterr().out
    again.mirror.finish()
    there = Job(tmp_path / "two", url)
    assert there.step == 4 and "restored" not in capsys.readouterr().out
    there.mirror.finish()
    anew = Job(tmp_path / "three", url, resume="never")
    assert not (tmp_path / "three" / "checkpoints").exists()
    anew.save(1, run="another")
    anew.mirror.finish()
    assert steps(server, url) == [1] and "checkpoints/step_4.pt" not in keys(server, url)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("step_8.pt", marks=pytest.mark.faults),
        "step_8.pt.json",
        pytest.param("latest", marks=pytest.mark.faults),
        ".bootfile-outputs.json",
    ],
)
def test_a_kill_in_the_middle_of_an_upload(server, tmp_path, name):
    """Whatever was the last to arrive, what the list names is whole."""
    url = f"s3://runs/killed-{name.strip('.')}"
    before = {"step_8.pt": 1, "step_8.pt.json": 1, "latest": 3, ".bootfile-outputs.json": 3}[name]
    with Gate(server.port, f"/{name}", before) as gate:
        env = environment(**server.environment | gate.environment)
        job = start("-c", JOB, tmp_path / "one", url, env=env)
        while gate.seen < before:
            assert job.poll() is None
            time.sleep(0.01)
        job.send_signal(signal.SIGKILL)
        finish(job, -signal.SIGKILL)
    listed = steps(server, url)
    if name.startswith("step_8"):
        assert listed == [6]
    restored = Job(tmp_path / "two", url)
    assert restored.step == listed[-1]
    restored.save(100)
    assert restored.mirror.finish() == ""
    left = [key for key in keys(server, url) if re.search(r"step_\d+\.pt$", key)]
    assert sorted(left) == sorted(f"checkpoints/step_{step}.pt" for step in (listed[-1], 100))


def test_damaged_checkpoints_are_refused_for_the_one_before(server, tmp_path, capsys):
    url = "s3://runs/damaged"
    job = Job(tmp_path / "one", url)
    for step in (2, 4):
        job.save(step)
        job.uploaded(server, step)
    job.mirror.finish()
    good = _read(server, url, "checkpoints/step_4.pt")
    _write(server, url, "checkpoints/step_4.pt", good[:-100] + bytes(100))
    second = Job(tmp_path / "two", url)
    assert second.step == 2 and not (tmp_path / "two" / "checkpoints" / "step_4.pt").exists()
    assert "checkpoint refused: s3://runs/damaged/checkpoints/step_4.pt: " in capsys.readouterr().out
    second.mirror.finish()
    _write(server, url, "checkpoints/step_2.pt.json", b"{}")
    with pytest.raises(BadInput, match=r"no checkpoint can be used: .*step_4.*step_2"):
        Job(tmp_path / "three", url)
    _write(server, url, ".bootfile-outputs.json", b"{")
    with pytest.raises(BadInput, match=r"bootfile-outputs\.json is damaged"):
        Job(tmp_path / "four", url)


def test_a_store_that_fails_does_not_end_the_job(server, tmp_path, monkeypatch, capsys):
    url = "s3://runs/fails"
    with FaultProxy(server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.environment["AWS_ENDPOINT_URL_S3"])
        job = Job(tmp_path / "one", url)
        job.save(2)
        job.uploaded(server, 2)
        proxy.kind, proxy.share = "forbidden", 1.0
        job.save(4)
        deadline, said = time.monotonic() + 20, ""
        while "warning" not in said:
            assert time.monotonic() < deadline
            said += capsys.readouterr().out
        assert re.fullmatch(
            r"warning: not uploaded to s3://runs/fails: .*no permission.*; training goes on.*\n", said
        )
        assert steps(server, url) == [2]
        proxy.kind = None
        proxy.struck.clear()
        job.save(6)
        job.uploaded(server, 6)
        proxy.kind = "forbidden"
        job.save(8)
        assert "no permission" in job.mirror.finish()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.environment["AWS_ENDPOINT_URL_S3"])
    assert Job(tmp_path / "two", url).step == 6


def test_two_jobs_at_one_url(server, tmp_path, capsys):
    url = "s3://runs/twice"
    first = Job(tmp_path / "one", url)
    first.save(2)
    with pytest.raises(
        BadInput, match=r"s3://runs/twice belongs to another job that is running \(process \d+ on"
    ):
        Job(tmp_path / "two", url)
    first.mirror.lease._ended.set()  # as a killed job: its lease stays
    begin = time.monotonic()
    second = Job(tmp_path / "two", url)
    assert 1.5 < time.monotonic() - begin < 10
    assert "watching for 2 s whether it is alive" in capsys.readouterr().out
    first.mirror.lease._check()  # it lives after all
    first.save(4)
    deadline = time.monotonic() + 10
    while "belongs to another job" not in capsys.readouterr().out:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "belongs to another job" in first.mirror.finish()
    assert second.mirror.finish() == "" and ".bootfile-lease.json" not in keys(server, url)


def test_a_file_that_is_written_to_while_it_is_sent(server, tmp_path):
    job = Job(tmp_path / "one", "s3://runs/appended")
    deadline = time.monotonic() + 3
    with open(tmp_path / "one" / "metrics.jsonl", "a", buffering=1) as file:
        number = 0
        while time.monotonic() < deadline:
            file.write(f'{{"step": {number}}}\n')
            number += 1
            job.mirror._wake.set()
    assert job.mirror.finish() == ""
    assert _read(server, job.url, "metrics.jsonl") == (tmp_path / "one" / "metrics.jsonl").read_bytes()
    assert not os.listdir(tmp_path / "one" / ".mirror")


def test_what_a_killed_job_has_begun_to_send_is_taken_back(server, tmp_path):
    client = server.client()
    for key in ("left/checkpoints/step_2.pt", "left-of-another/step_2.pt"):
        client.create_multipart_upload(Bucket="runs", Key=key)
    job = Job(tmp_path / "one", "s3://runs/left")
    job.mirror.finish()
    unfinished = client.list_multipart_uploads(Bucket="runs").get("Uploads", [])
    assert [each["Key"] for each in unfinished] == ["left-of-another/step_2.pt"]
