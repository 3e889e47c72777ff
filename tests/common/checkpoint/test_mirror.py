"""The results of a job are at its URL, and its list names only whole files. The server is real."""

import contextlib
import hashlib
import json
import queue
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from bootfile.exact import checked_files
from bootfile.exact import files as checkpoint
from bootfile.ground import lease as run_lease
from bootfile.ground.errors import BadInput
from common.checkpoint import mirror, output_list
from common.checkpoint import restore as restoring
from common.object_store.store import ObjectStore, StoreError
from common.run.output import Output
from common.run.run import JobParser, Run
from tests.conftest import names, wait_until
from tests.support.exact import is_whole
from tests.support.fault_proxy import FaultProxy


class Auditor(FaultProxy):
    """A proxy that checks before every writing request that the list at the URL is correct.

    refuse: requests that contain this text get an error.
    weights: the list must not name a checkpoint without the weights epoch_<step>.pth and best.pth.
    """

    weights = False

    def __init__(self, server, url: str, kind: str = "forbidden"):
        super().__init__(server.port, kind, share=0.0)
        self.server, self.url, self.wrong, self.refuse = server, url, [], None

    def plan(self, line: str):
        if line.split()[0] in ("PUT", "POST", "DELETE"):
            self.check(f"before {line}")
        if self.refuse and self.refuse in line:
            return self.kind, 0.5
        return super().plan(line)

    def check(self, when: str) -> None:
        """Compare the files with the list. Other requests may change both meanwhile: then compare again."""
        listed = self._content(".bootfile-outputs.json")
        while listed:
            files = json.loads(listed)["files"]
            wrong = [f"{file['path']} {when}" for file in files if not self._is_there(file)]
            for step in steps(self.server, self.url) if self.weights else ():
                needed = {f"epoch_{step}.pth", "best.pth"} - set(keys(self.server, self.url))
                wrong += [f"no {name} {when}" for name in needed]
            before, listed = listed, self._content(".bootfile-outputs.json")
            if listed == before:
                self.wrong += wrong
                return

    def _is_there(self, file: dict) -> bool:
        content = self._content(file["path"])
        return (len(content), hashlib.sha256(content).hexdigest()) == (file["size"], file["sha256"])

    def _content(self, key: str) -> bytes:
        with contextlib.suppress(self.server.client().exceptions.NoSuchKey):
            return read_object(self.server, self.url, key)
        return b""


@pytest.fixture(autouse=True)
def here(server, monkeypatch):
    for name, value in (server.environment | {"BOOTFILE_STORE_ATTEMPTS": "2"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run_lease, "RENEW", 0.3)
    monkeypatch.setattr(run_lease, "WATCH", 2.0)
    yield
    while Job.running:  # its thread would print into a later test
        Job.running.pop().finish()


class Job:
    """A stand-in for a job that writes to its output folder."""

    running: ClassVar[list] = []  # mirrors

    def __init__(self, folder: Path, url: str, resume: str = "auto", keep: int = 2, every: int = 0):
        self.folder, self.url, self.every = folder, url, every
        folder.mkdir(exist_ok=True)
        self.mirror = mirror.Mirror(Output(str(folder), url), resume, keep)
        self.running.append(self.mirror)
        paths = checkpoint.list_newest_first(str(folder / "checkpoints"))
        self.state = checked_files.read(paths[0]) if paths else {"step": 0}
        self.step = self.state["step"] if resume == "auto" else 0
        self.mirror.start(self.step, every)

    def save(self, step: int, run: str = "r") -> str:
        """Write a checkpoint, start its upload, and return its path."""
        folder = self.folder / "checkpoints"
        folder.mkdir(exist_ok=True)
        path = str(folder / checkpoint.name_of(step))
        checkpoint.write(path, {"step": step, "x": torch.rand(1000)}, step=step, run=run)
        checkpoint.keep(path, self.mirror.keep, is_whole, self.every)
        self.mirror.saved(step)
        return path

    def upload(self, server, step: int) -> str:
        """Save, and wait until the list at the URL names the checkpoint."""
        path = self.save(step)
        wait_until(lambda: step in steps(server, self.url), timeout=60)
        return path

    def end(self, step: int, run: str = "r") -> str:
        """Save, and return the reason why not all was uploaded, or ""."""
        self.save(step, run)
        return self.mirror.finish()


def keys(server, url: str) -> list[str]:
    prefix = url.partition("://runs/")[2] + "/"
    found = server.client().list_objects(Bucket="runs", Prefix=prefix).get("Contents", [])
    return [entry["Key"].removeprefix(prefix) for entry in found]


def steps(server, url: str) -> list[int]:
    """Return the steps of the checkpoints that the list names."""
    paths = [each["path"] for each in read_list(server, url)["files"]]
    return sorted(int(match[1]) for path in paths if (match := re.search(r"step_(\d+)\.pt$", path)))


def read_list(server, url: str) -> dict:
    is_there = output_list.NAME in keys(server, url)
    return json.loads(read_object(server, url, output_list.NAME)) if is_there else {"files": []}


def write_list(server, url: str, files: list[dict]) -> None:
    write_object(server, url, output_list.NAME, json.dumps({"format": 1, "files": files}).encode())


def read_object(server, url: str, key: str) -> bytes:
    name = f"{url.partition('://runs/')[2]}/{key}"
    return server.client().get_object(Bucket="runs", Key=name)["Body"].read()


def write_object(server, url: str, key: str, content: bytes) -> None:
    server.client().put_object(Bucket="runs", Key=f"{url.partition('://runs/')[2]}/{key}", Body=content)


def test_results_are_at_the_url_and_come_back(server, tmp_path):
    job = Job(tmp_path / "one", "s3://runs/whole")
    for step in (2, 4, 6):
        content = Path(job.upload(server, step)).read_bytes()
    (tmp_path / "one" / "metrics.jsonl").write_text('{"step": 6}\n')
    (tmp_path / "one" / "index").mkdir()
    (tmp_path / "one" / "index" / "large").write_text("stays on the node")
    assert job.mirror.finish() == ""
    assert keys(server, job.url) == [
        ".bootfile-outputs.json", "checkpoints/step_4.pt", "checkpoints/step_4.pt.json",
        "checkpoints/step_6.pt", "checkpoints/step_6.pt.json", "metrics.jsonl",
    ]  # fmt: skip
    marker = read_list(server, job.url)
    assert marker["step"] == 6
    assert {each["path"] for each in marker["files"]} == set(keys(server, job.url)[1:])

    other = Job(tmp_path / "two", job.url)
    (restored,) = (tmp_path / "two" / "checkpoints").glob("*.pt")
    assert other.step == 6 and restored.name == "step_6.pt" and restored.read_bytes() == content
    assert (tmp_path / "two" / "metrics.jsonl").read_text() == '{"step": 6}\n'
    assert other.end(8) == "" and steps(server, job.url) == [6, 8]


def test_a_new_run_replaces_the_later_checkpoints_of_the_one_before(server, tmp_path):
    url = "s3://runs/later"
    Job(tmp_path / "first", url).end(10)
    assert Job(tmp_path / "second", url, resume="never").end(2) == "" and steps(server, url) == [2]
    assert Job(tmp_path / "third", url).step == 2


def test_a_restart_that_trains_nothing_deletes_what_no_list_names(server, tmp_path):
    """A job was killed before it deleted the checkpoints that its last one replaces."""
    url = "s3://runs/left"
    job = Job(tmp_path / "first", url)
    job.end(3)
    write_object(server, url, "checkpoints/step_2.pt", b"x")
    Job(tmp_path / "second", url).mirror.finish()
    assert [key for key in keys(server, url) if "step_" in key] == [
        "checkpoints/step_3.pt", "checkpoints/step_3.pt.json"
    ]  # fmt: skip


@pytest.mark.thorough
def test_what_lies_on_the_node_is_taken_where_it_is_as_new(server, tmp_path, capsys):
    url = "s3://runs/places"
    first = Job(tmp_path / "one", url)
    first.end(2)
    second = Job(tmp_path / "two", url)
    second.end(4)
    again = Job(tmp_path / "one", url)  # the folder has an older copy
    assert again.step == 4 and "restored step_4.pt" in capsys.readouterr().out
    again.mirror.finish()
    there = Job(tmp_path / "two", url)
    assert there.step == 4 and "restored" not in capsys.readouterr().out
    there.mirror.finish()
    fresh = Job(tmp_path / "three", url, resume="never")
    assert not (tmp_path / "three" / "checkpoints").exists()
    fresh.end(1, run="another")
    assert steps(server, url) == [1] and "checkpoints/step_4.pt" not in keys(server, url)


@pytest.mark.thorough
def test_a_store_that_fails_does_not_end_the_job(server, tmp_path, monkeypatch):
    url, lines = "s3://runs/fails", queue.SimpleQueue()
    monkeypatch.setattr(mirror, "print_line", lines.put)
    with FaultProxy(server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.environment["AWS_ENDPOINT_URL_S3"])
        job = Job(tmp_path / "one", url)
        job.upload(server, 2)
        proxy.kind, proxy.share = "forbidden", 1.0
        job.save(4)
        said = lines.get(timeout=60)
        assert re.fullmatch(r"warning: not uploaded to s3://runs/fails: .*no permission.*", said)
        assert steps(server, url) == [2]
        proxy.kind = None
        proxy.struck.clear()
        job.upload(server, 6)
        proxy.kind = "forbidden"
        assert "no permission" in job.end(8)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.environment["AWS_ENDPOINT_URL_S3"])
    assert Job(tmp_path / "two", url).step == 6


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["forbidden", "no such method", "locked", "not implemented"])
@pytest.mark.parametrize("at_start", [True, False])
def test_a_store_that_deletes_nothing_gets_all_results(server, tmp_path, monkeypatch, capfd, kind, at_start):
    """Write-once buckets and policies without DELETE: a warning, and no error. The next job need not wait."""
    monkeypatch.setattr(run_lease, "WATCH", 600.0)  # a job that watches fails by the limit of the test
    url = f"s3://runs/kept/{kind.replace(' ', '-')}/{at_start}"
    with Auditor(server, url, kind) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.environment["AWS_ENDPOINT_URL_S3"])
        proxy.refuse = "DELETE " if at_start else None
        job = Job(tmp_path / "first", url, keep=1)
        proxy.refuse = "DELETE "
        for step in (1, 2, 3):
            job.upload(server, step)
        assert job.mirror.finish() == ""
        assert steps(server, url) == [3]
        assert {f"checkpoints/step_{step}.pt" for step in (1, 2, 3)} <= set(keys(server, url))
        text = "".join(capfd.readouterr())
        assert text.count("warning: ") == 1 and re.search("stays? there", text)
        again = Job(tmp_path / "second", url, keep=1)
        assert again.step == 3
        again.upload(server, 4)
        assert again.mirror.finish() == "" and steps(server, url) == [4]
        assert not proxy.wrong
    assert "checking" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("kind", ["busy", "reset"])
def test_the_last_upload_is_repeated_until_the_store_answers(server, tmp_path, monkeypatch, capfd, kind):
    url = f"s3://runs/last-{kind}"
    monkeypatch.setattr(mirror, "_SAY", 0.1)
    with FaultProxy(server.port) as proxy, ThreadPoolExecutor(1) as pool:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.environment["AWS_ENDPOINT_URL_S3"])
        job = Job(tmp_path / "one", url)
        proxy.kind, proxy.share = kind, 1.0
        job.save(2)
        end = pool.submit(job.mirror.finish)
        tries = lambda: capfd.readouterr().out.count("waiting for the upload to s3://runs/last")  # noqa: E731
        wait_until(lambda: job.mirror.error and tries(), timeout=60)
        assert not end.done() and steps(server, url) == []
        proxy.kind = None
        proxy.struck.clear()
        assert end.result(60) == "" and steps(server, url) == [2]


def test_the_last_upload_is_not_repeated_for_ever(server, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "_PATIENCE", 0.1)
    with FaultProxy(server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.environment["AWS_ENDPOINT_URL_S3"])
        job = Job(tmp_path / "one", "s3://runs/patience")
        proxy.kind, proxy.share = "busy", 1.0
        assert "the store is too busy" in job.end(2)


def test_the_last_checkpoints_of_the_node_are_at_the_url_at_the_end(server, tmp_path, monkeypatch):
    """The thread takes the newest checkpoint of each turn, so it leaves some out meanwhile."""
    job = Job(tmp_path / "one", "s3://runs/last", keep=3)
    job.upload(server, 2)
    monkeypatch.setattr(
        job.mirror, "saved", lambda step: setattr(job.mirror, "_newest_step", step)
    )  # no turn
    for step in (4, 6, 8, 10):
        job.save(step)
    assert job.mirror.finish() == "" and steps(server, job.url) == [6, 8, 10]
    assert [key for key in keys(server, job.url) if "step_2" in key or "step_4" in key] == []


@pytest.mark.thorough
def test_a_row_of_old_checkpoints_stays_at_the_url(server, tmp_path, monkeypatch):
    """Also those that come faster than the uploads, and on a new node, which has only the newest one."""
    url = "s3://runs/row"
    job = Job(tmp_path / "one", url, keep=1, every=10)
    for step in (8, 10, 12):
        job.upload(server, step)
    saved = job.mirror.saved
    monkeypatch.setattr(
        job.mirror, "saved", lambda step: setattr(job.mirror, "_newest_step", step)
    )  # no turn
    job.save(20)
    monkeypatch.setattr(job.mirror, "saved", saved)
    assert job.end(24) == "" and steps(server, url) == [10, 20, 24]
    again = Job(tmp_path / "two", url, keep=1, every=10)
    assert again.step == 24
    for step in (26, 30, 32):
        again.upload(server, step)
    assert again.mirror.finish() == "" and steps(server, url) == [10, 20, 30, 32]
    files = {f"checkpoints/step_{step}.pt{end}" for step in (10, 20, 30, 32) for end in ("", ".json")}
    assert {key for key in keys(server, url) if key.startswith("checkpoints/")} == files


def test_a_lease_that_is_shown_late_is_no_error(server, tmp_path, monkeypatch):
    """Some stores do not find a new object at once."""
    read, hidden = ObjectStore.read_version, [(b"", None)]

    def first_missing(self, key):
        if key == mirror.KEY and key in written and hidden:
            return hidden.pop()
        return read(self, key)

    written, write = set(), ObjectStore.write
    monkeypatch.setattr(
        ObjectStore, "write", lambda self, key, *a, **b: (written.add(key), write(self, key, *a, **b))[1]
    )
    monkeypatch.setattr(ObjectStore, "read_version", first_missing)
    assert Job(tmp_path / "one", "s3://runs/late").mirror.finish() == "" and not hidden


@pytest.mark.thorough
def test_two_jobs_at_one_url(server, tmp_path, monkeypatch, capsys):
    url = "s3://runs/twice"
    monkeypatch.setattr(run_lease, "WATCH", 400.0)  # a busy machine may renew the lease late
    first = Job(tmp_path / "one", url)
    first.save(2)
    with pytest.raises(BadInput, match=r"s3://runs/twice .*another job .*running .*process \d+ "):
        Job(tmp_path / "two", url)
    first.mirror.lease._ended.set()  # like a killed job, it leaves its lease
    begin = time.monotonic()
    monkeypatch.setattr(run_lease, "WATCH", 2.0)
    second = Job(tmp_path / "two", url)
    assert time.monotonic() - begin > 1.5
    assert names(capsys.readouterr().out, "s3://runs/twice", "another job")
    second.upload(server, 20)
    before = read_object(server, url, output_list.NAME)
    lines = queue.SimpleQueue()
    monkeypatch.setattr(mirror, "print_line", lines.put)
    first.save(12)  # it was paused, and now continues
    assert "belongs to another job" in lines.get(timeout=60)
    assert "belongs to another job" in first.mirror.finish()
    assert read_object(server, url, output_list.NAME) == before and steps(server, url) == [2, 20]
    assert ".bootfile-lease.json" in keys(server, url), "the lease is that of the second job"

    second.mirror.lease._ended.set()  # the same, after its successor has ended
    third = Job(tmp_path / "three", url)
    assert third.step == 20 and third.mirror.finish() == ""
    assert f"the lease of {url} was deleted" in second.end(30) and steps(server, url) == [2, 20]


@pytest.mark.thorough
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
    assert read_object(server, job.url, "metrics.jsonl") == (tmp_path / "one" / "metrics.jsonl").read_bytes()
    assert not (tmp_path / "one" / ".mirror").exists()


def test_a_whole_bucket_is_refused(monkeypatch):
    for url in ("s3://runs", "obs://runs/"):
        parser = JobParser("")
        parser.add_argument("--train_url", dest="output_dir")
        parser.add_argument("--enable_gpu", default=False)
        monkeypatch.setattr(sys, "argv", ["train.py", "--train_url", url])
        with pytest.raises(BadInput, match=f"{url} is a whole bucket"):
            Run(parser.parse_args())


@pytest.mark.thorough
def test_the_list_is_correct_at_any_moment(server, tmp_path, monkeypatch):
    """It is correct between any two requests, for every kind of file that is overwritten, even if an answer
    is lost, a job restarts at an earlier step, or a new run begins."""
    url = "s3://runs/audited"
    history = ("metrics.jsonl", "receipt.bin", "starts.jsonl", "events.out.tfevents.1")

    def work(name: str, start: int, end: int, resume: str = "auto") -> Job:
        job = Job(tmp_path / name, url, resume, keep=1)
        for step in range(start, end):
            for each in (*history, "best.pth", f"epoch_{step}.pth", "classes.json"):
                with open(job.folder / each, "a") as file:
                    file.write(f"{name} {step}\n")
            job.save(step, run=name)
            first = restoring.names_of(step)[0]
            wait_until(lambda first=first: first in (job.mirror._listed or ()), timeout=60)
        return job

    with Auditor(server, url, "reset") as audit:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", audit.environment["AWS_ENDPOINT_URL_S3"])
        audit.weights = True
        job = work("one", 1, 4)
        audit.weights = False  # the next checkpoint has no weights
        audit.refuse = ".bootfile-outputs.json"  # the list is written, and the answer is lost
        (job.folder / "best.pth").write_bytes(b"another")
        job.save(4, run="one")
        wait_until(lambda: job.mirror.error, timeout=60)
        audit.refuse = None
        assert job.mirror.finish() == "" and steps(server, url) == [4]
        shutil.rmtree(tmp_path / "one" / "checkpoints")
        write_object(server, url, "checkpoints/step_4.pt", b"damaged")
        audit.wrong.clear()
        with pytest.raises(BadInput, match="no checkpoint can be used"):
            Job(tmp_path / "one", url)
        assert work("one", 1, 5, "never").mirror.finish() == "" and steps(server, url) == [4]
        audit.wrong = [each for each in audit.wrong if "step_4.pt" not in each]  # until the first is there
        assert work("two", 5, 7).mirror.finish() == "" and steps(server, url) == [6]
        audit.check("at the end")
        assert audit.wrong == []
        there = keys(server, url)
        assert {"best.pth", "epoch_6.pth", "classes.json", *history} <= set(there)
        listed = {each["path"] for each in read_list(server, url)["files"]}
        assert listed == set(there) - {output_list.NAME}


def test_the_weights_of_the_run_stay_when_its_node_changes(server, tmp_path, monkeypatch):
    """They stay if a node with older weights comes back, and if an upload of them is interrupted."""
    url = "s3://runs/weights"
    for node, step in (("one", 2), ("two", 4), ("one", 6), ("one", 8)):
        job = Job(tmp_path / node, url)
        assert job.step == max(0, step - 2)
        if node != "one" or step == 2:  # the second node has better weights, the first one no more
            (job.folder / "best.pth").write_bytes(node.encode())
            (job.folder / f"epoch_{step}.pth").write_bytes(node.encode())
        assert job.end(step) == ""
    assert [read_object(server, url, name) for name in ("best.pth", "epoch_2.pth")] == [b"two", b"one"]

    # an error while the files are collected: the next upload sends the weights
    job, real = Job(tmp_path / "one", url), mirror._copy
    (job.folder / "best.pth").write_bytes(b"better")

    def fail(path, snapshot):
        if path.endswith("metrics.jsonl"):
            raise OSError(28, "full")
        real(path, snapshot)

    (job.folder / "metrics.jsonl").write_text("{}")
    monkeypatch.setattr(mirror, "_copy", fail)
    job.save(10)
    wait_until(lambda: job.mirror.error, timeout=60)
    monkeypatch.setattr(mirror, "_copy", real)
    assert job.mirror.finish() == "" and read_object(server, url, "best.pth") == b"better"

    # a job that was killed between the two lists has removed best.pth from the list
    files = read_list(server, url)["files"]
    write_list(server, url, [each for each in files if each["path"] != "best.pth"])
    job = Job(tmp_path / "three", url)
    assert job.end(12) == ""
    assert "best.pth" in {each["path"] for each in read_list(server, url)["files"]}


@pytest.mark.thorough
def test_a_job_that_was_held_does_not_replace_the_list_of_its_successor(server, tmp_path, monkeypatch):
    """It was held between the check of its lease and the write."""
    url = "s3://runs/held"
    with FaultProxy(server.port, held=".bootfile-outputs.json", passed=10**6) as proxy:
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL_S3", proxy.environment["AWS_ENDPOINT_URL_S3"])
            patch.setenv("BOOTFILE_STORE_TIMEOUT", "60")
            first = Job(tmp_path / "one", url, keep=1)
            first.upload(server, 10)
            wait_until(lambda: first.mirror._listed, timeout=60)
            proxy.passed = 0
            (first.folder / "best.pth").write_bytes(b"first")
            first.mirror._wake.set()
            wait_until(lambda: proxy.holding, timeout=60)
        first.mirror.lease._ended.set()
        second = Job(tmp_path / "two", url, keep=1)
        second.upload(server, 20)
        assert second.mirror.finish() == ""
        before = read_object(server, url, output_list.NAME)
        proxy.released.set()
        assert first.mirror.finish() != ""
    assert read_object(server, url, output_list.NAME) == before
    assert Job(tmp_path / "three", url).step == 20


@pytest.mark.thorough
def test_a_job_that_was_held_does_not_take_its_lease_back(server, tmp_path, monkeypatch):
    url = "s3://runs/held-lease"
    first = Job(tmp_path / "one", url)
    lease = first.mirror.lease
    lease._ended.set()
    lease.check()  # here it is held, before the write
    second = Job(tmp_path / "two", url)
    lease._write()
    second.upload(server, 2)
    with pytest.raises(BadInput, match="belongs to another job"):
        lease.check()


@pytest.mark.thorough
def test_half_a_checkpoint_replaces_none(server, tmp_path, monkeypatch):
    """This holds if the checksum has not arrived, and if the file on the node is damaged."""
    url = "s3://runs/half"
    with Auditor(server, url) as audit:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", audit.environment["AWS_ENDPOINT_URL_S3"])
        job = Job(tmp_path / "one", url, keep=1)
        job.upload(server, 2)
        audit.refuse = "step_4.pt.json"
        job.save(4)
        wait_until(lambda: "step_4.pt.json" in job.mirror.error, timeout=60)
        assert steps(server, url) == [2]
        audit.refuse = None
        path = Path(job.save(6))
        path.write_bytes(path.read_bytes()[:-10] + bytes(10))
        (job.folder / "checkpoints" / "step_4.pt").unlink(missing_ok=True)
        job.mirror._wake.set()
        job.mirror.finish()
        listed = steps(server, url)
        assert listed and set(listed) <= {2, 6}
        assert audit.wrong == []
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.environment["AWS_ENDPOINT_URL_S3"])
    assert Job(tmp_path / "two", url).step == listed[-1]


def _flip(server, url: str, *names: str) -> None:
    for name in names:
        content = bytearray(read_object(server, url, name))
        content[len(content) // 2] ^= 1
        write_object(server, url, name, bytes(content))


@pytest.mark.thorough
def test_damage_at_the_url_leaves_the_nodes_own_checkpoints(server, tmp_path, monkeypatch, capsys):
    url, place = "s3://runs/own", tmp_path / "one" / "checkpoints"
    job = Job(tmp_path / "one", url, keep=3)
    for step in (1, 2, 3):
        job.upload(server, step)
    job.mirror.finish()
    shutil.copytree(place, tmp_path / "kept")

    def have(*numbers: int) -> dict[str, bytes]:
        """Leave these checkpoints on the node, and return its files."""
        shutil.rmtree(place)
        place.mkdir()
        for name in [f"step_{number}.pt{end}" for number in numbers for end in ("", ".json")]:
            shutil.copy(tmp_path / "kept" / name, place)
        return whole()

    def whole() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in place.glob("step_*")}

    # damage step 3 at the URL, then the checksum of step 2, then all: the node's own checkpoint is used
    for damaged, wanted in (("step_3.pt", 2), ("step_2.pt.json", 1), ("step_1.pt", 1)):
        _flip(server, url, f"checkpoints/{damaged}")
        before = have(1)
        job = Job(tmp_path / "one", url, keep=3)
        assert job.step == wanted and before.items() <= whole().items()
        assert not (place / "step_3.pt").exists()
        assert f"checkpoint refused: {url}/checkpoints/step_3.pt: " in capsys.readouterr().out
        job.mirror.finish()
    job = Job(tmp_path / "one", url, keep=3)
    job.upload(server, 2)
    job.mirror.finish()
    assert Job(tmp_path / "two", url).step == 2

    # the node's checkpoint of the same step, from another run, stays until the download is whole
    url = "s3://runs/own2"
    for step in (1, 2):
        _put_checkpoint(server, url, tmp_path / "theirs", step)
    _flip(server, url, "checkpoints/step_2.pt")
    before = have(1)
    real, errors = ObjectStore.fetch, [StoreError("cannot be reached", "unreachable"), KeyboardInterrupt()]

    def fetch(self, key, *more):
        if "step_1" in key and errors:
            raise errors.pop()
        return real(self, key, *more)

    monkeypatch.setattr(ObjectStore, "fetch", fetch)
    while errors:
        with pytest.raises(type(errors[-1])):
            Job(tmp_path / "one", url)
        assert whole() == before
    job = Job(tmp_path / "one", url)
    assert job.step == 1
    assert whole() == {path.name: path.read_bytes() for path in (tmp_path / "theirs").glob("step_1.*")}
    job.mirror.finish()
    _flip(server, url, "checkpoints/step_1.pt")
    with pytest.raises(BadInput, match=r"no checkpoint can be used: .*step_2.*step_1"):
        Job(tmp_path / "three", url)
    assert steps(server, url) == [1, 2], "the URL is unchanged"


def _put_checkpoint(server, url: str, folder: Path, step: int) -> None:
    """Upload a checkpoint of another run, and a list of all files in the folder."""
    folder.mkdir(exist_ok=True)
    checkpoint.write(
        str(folder / f"step_{step}.pt"), {"step": step, "x": torch.rand(10)}, step=step, run="other"
    )
    files = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        write_object(server, url, f"checkpoints/{path.name}", content)
        digest = hashlib.sha256(content).hexdigest()
        files.append({"path": f"checkpoints/{path.name}", "size": len(content), "sha256": digest})
    write_list(server, url, files)


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "content",
    [
        DEEP, b"5", b"null", b"\xff", b"{", b'{"format": 1, "files": 5}', b'{"format": 2, "files": []}',
        b'{"format": 1, "files": [{"path": 5, "size": 1, "sha256": "%s"}]}' % (b"0" * 64),
        b'{"format": 1, "files": [{"path": "a", "size": Infinity, "sha256": "%s"}]}' % (b"0" * 64),
        b'{"format": 1, "files": [{"path": "a", "size": 1, "sha256": null}]}',
        b'{"format": [], "files": []}',
    ],
)  # fmt: skip
def test_lists_that_are_none_are_refused(content):
    store = SimpleNamespace(
        read_version=lambda key: (content, "etag"),
        location=SimpleNamespace(url=lambda key: f"s3://runs/{key}"),
    )
    with pytest.raises(BadInput, match=r"s3://runs/\.bootfile-outputs\.json"):
        restoring.read_list(store)


@pytest.mark.parametrize(
    "content",
    [DEEP, b"5", b"{}", b'{"id": "x", "time": "noon", "host": "a\\nb"}', b'{"id": [], "time": null}'],
)
def test_leases_that_are_none_are_taken_over(server, tmp_path, monkeypatch, capsys, content):
    monkeypatch.setattr(run_lease, "WATCH", 0.1)
    write_object(server, "s3://runs/nolease", mirror.KEY, content)
    assert Job(tmp_path / "one", "s3://runs/nolease").mirror.finish() == ""
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("facts", [b"null", DEEP, b'{"seal": 1}', {"step": 1.5}, {"size": "x"}])
def test_checksums_that_are_none_are_refused(server, tmp_path, facts, capsys):
    """facts: the content of a checkpoint's checksum, or its wrong parts."""
    url = "s3://runs/facts"
    _put_checkpoint(server, url, tmp_path / "theirs", 1)
    _put_checkpoint(server, url, tmp_path / "theirs", 2)
    files = read_list(server, url)["files"]
    (entry,) = (each for each in files if each["path"].endswith("step_2.pt.json"))
    if isinstance(facts, dict):
        known = checked_files.facts_of(str(tmp_path / "theirs" / "step_2.pt"))
        facts = checkpoint.seal(known | facts).encode()
    write_object(server, url, entry["path"], facts)
    entry |= {"size": len(facts), "sha256": hashlib.sha256(facts).hexdigest()}
    write_list(server, url, files)
    job = Job(tmp_path / "one", url)
    printed = capsys.readouterr().out
    assert job.step == 1 and "checkpoint refused: s3://runs/facts/checkpoints/step_2.pt" in printed
    job.mirror.finish()
