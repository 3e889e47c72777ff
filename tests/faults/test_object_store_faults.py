"""Two hundred random faults of thirteen kinds between a job and its object store damage no file.

Upload, fetch and staging use a proxy that injects faults, or their disk fills up, or they are killed.
Afterwards all visible files are complete, on both sides. A failure is one line, in bounded time. The same
command finishes when the fault is over.
"""

import contextlib
import hashlib
import random
import resource
import subprocess
import threading
import time
from pathlib import Path

import pytest

from launch import manifests
from tests.conftest import environment, run, start
from tests.support.fault_proxy import FaultProxy
from tests.support.repeats import repeats
from tests.support.small_disk import small_disk

pytest.importorskip("boto3", reason="boto3 is not installed")
pytest.importorskip("moto", reason="moto is not installed")

WIRE = ("busy", "reset", "stall", "cut", "flip", "slow", "expired", "forbidden", "gone")
KINDS = (*WIRE, "missing", "full", "kill upload", "kill fetch")
REFUSED = {
    "expired": "credentials have expired",
    "forbidden": "no permission",
    "missing": "no such bucket",
    "full": ("File too large", "No space left", "MB are free", "GB are free"),
}
LONGEST = 120.0  # seconds: limit for a command with any fault
STAGE = """
import sys
from common.distributed.entry import entry
from datasets import staging
entry(lambda: print("staged at", staging.stage(sys.argv[1])))()
"""


class Case:
    """A command, its files, and the check of the visible files."""

    def __init__(self, server, folder: Path, number: int):
        self.server, self.folder = server, folder
        self.draw = random.Random(number)
        self.kind = KINDS[number % len(KINDS)]
        names = {"kill upload": ("upload",), "kill fetch": ("fetch", "stage"), "full": ("fetch", "stage")}
        self.name = self.draw.choice(names.get(self.kind, ("upload", "fetch", "stage")))
        self.prefix = f"{number}-{self.name}"
        self.bucket = "nothing" if self.kind == "missing" else "bucket"
        self.files = {f"{n}/ü {n}": self.draw.randbytes(self.draw.randrange(60_000)) for n in range(10)}
        self.files["big"] = self.draw.randbytes(9_000_000 + self.draw.randrange(1000))
        self.here = folder / "here"
        self._prepare()

    def _prepare(self) -> None:
        if self.name == "upload":
            for name, content in self.files.items():
                (self.here / name).parent.mkdir(parents=True, exist_ok=True)
                (self.here / name).write_bytes(content)
        else:
            self.here.mkdir()
            client = self.server.client()
            for name, content in self.files.items():  # with a sha256, as `upload` stores it, or without
                has_sha256 = self.draw.random() < 0.7
                extra = {"Metadata": {"sha256": hashlib.sha256(content).hexdigest()}} if has_sha256 else {}
                client.put_object(Bucket="bucket", Key=f"{self.prefix}/{name}", Body=content, **extra)

    def command(self, bucket: str) -> list[str]:
        url = f"s3://{bucket}/{self.prefix}"
        return {
            "upload": ["-m", "launch", "upload", str(self.here), "--to", url],
            "fetch": ["-m", "launch", "fetch", url, "--to", str(self.here)],
            "stage": ["-c", STAGE, url],
        }[self.name]

    def start(self, bucket: str = "bucket", limit: int | None = None, **more: str) -> subprocess.Popen:
        """Start the command. limit: maximum size of a file in bytes."""
        variables = self.server.environment | more
        variables |= {"BOOTFILE_SCRATCH": str(self.here), "BOOTFILE_STORE_TIMEOUT": "1"}
        job = start(*self.command(bucket), env=environment(**variables))
        if limit:
            resource.prlimit(job.pid, resource.RLIMIT_FSIZE, (limit, limit))
        return job

    def stored(self) -> dict[str, bytes]:
        client, found = self.server.client(), {}
        for entry in client.list_objects_v2(Bucket="bucket", Prefix=f"{self.prefix}/").get("Contents", []):
            body = client.get_object(Bucket="bucket", Key=entry["Key"])["Body"].read()
            found[entry["Key"][len(self.prefix) + 1 :]] = body
        return found

    def unfinished(self) -> list[str]:
        answer = self.server.client().list_multipart_uploads(Bucket="bucket", Prefix=f"{self.prefix}/")
        return [each["Key"] for each in answer.get("Uploads", [])]

    def clean(self) -> None:
        run("-m", "launch", "upload", "--clean", "--to", f"s3://bucket/{self.prefix}", "--yes",
            env=environment(**self.server.environment))  # fmt: skip

    def visible(self) -> dict[str, bytes]:
        """Return the files that a user of the folder sees; of a staged data set, those below `data`."""
        roots = list(self.here.glob("**/data")) if self.name == "stage" else [self.here]
        return {
            str(path.relative_to(root)): path.read_bytes()
            for root in roots
            for path in root.rglob("*")
            if path.is_file() and not path.name.startswith((".partial-", ".bootfile-"))
        }

    def check(self, done: bool) -> None:
        """Assert that no damaged or partial file is visible. done: assert that all files are visible."""
        if self.name == "upload":
            there = self.stored()
            manifest = there.pop("manifest.json", None)
            assert {name: self.files[name] for name in there} == there, "a corrupt object was accepted"
            assert not manifest or there == self.files, "a manifest exists, but a file is missing"
            assert manifest or not done  # a killed process may have finished before
            assert not manifest or manifests.parse(manifest)
        else:
            here = self.visible()
            assert {name: self.files[name] for name in here} == here, "a corrupt file was accepted"
            assert here == self.files or not done
            assert here == self.files or self.name == "fetch" or not here, "a part of the files is visible"
            if done:
                assert not list(self.here.rglob(".partial-*"))


def finished(job: subprocess.Popen) -> tuple[int, str]:
    """Return (exit code, stderr), in bounded time."""
    try:
        _, errors = job.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        job.kill()
        job.communicate()
        pytest.fail(f"no end within {LONGEST} s: {job.args}")
    return job.returncode, errors


def kill_at(job: subprocess.Popen, proxy: FaultProxy, requests: int) -> None:
    while job.poll() is None and proxy.requests < requests:
        time.sleep(0.002)
    job.kill()


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(repeats(200, len(KINDS))))
def test_a_fault_leaves_nothing_wrong(server, tmp_path, number):
    case = Case(server, tmp_path, number)
    kind, draw = case.kind, case.draw
    wire, kill = kind if kind in WIRE else None, kind.startswith("kill")
    after = draw.randrange(20) if kind in ("expired", "forbidden", "gone") else 0
    share = 1.0 if kind in REFUSED or kind == "gone" else draw.choice([0.1, 0.25])
    proxy = FaultProxy(server.port, wire, draw.random(), share, after, delay=0.03 if kill else 0.0)
    limit = draw.randrange(1, 8) * 10**6 if kind == "full" else None
    with proxy:
        job = case.start(case.bucket, limit, **proxy.environment)
        if kill:
            killer = threading.Thread(target=kill_at, args=(job, proxy, draw.randrange(2, 22)))
            killer.start()
        code, errors = finished(job)
    said = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in errors and "testing-secret" not in errors
    if kill and code == -9:
        pass
    elif code:
        assert code == 2 and len(said) == 1, errors
        words = REFUSED.get(kind, "")
        assert any(word in said[0] for word in ([words] if isinstance(words, str) else words)), said
        if kind != "full":
            assert f"//{case.bucket}/{case.prefix}" in said[0], said
    assert kind not in ("missing", "full") or code == 2
    case.check(done=code == 0)
    with FaultProxy(server.port, port=proxy.port) as mended:  # staging identifies a store by its address
        again, errors = finished(case.start(**mended.environment))
    assert again == 0, errors
    case.check(done=True)
    if case.unfinished():  # an answer was lost, or the process was killed
        case.clean()
    assert case.unfinished() == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fetch", "stage"])
def test_a_disk_that_becomes_full_meanwhile(server, tmp_path, name):
    case = Case(server, tmp_path, 1000 + KINDS.index("full"))
    case.name = name
    with small_disk(case.here, "12m"):
        with FaultProxy(server.port, delay=0.2) as proxy:
            job = case.start(**proxy.environment)
            while not list(case.here.rglob(".partial-*")):
                assert job.poll() is None, job.communicate()
                time.sleep(0.002)
            with open(case.here / ".bootfile-other", "wb", 0) as other, contextlib.suppress(OSError):
                while True:
                    other.write(bytes(1 << 16))
            code, errors = finished(job)
        assert code == 2 and errors.count("error: ") == 1 and "No space left on device" in errors, errors
        case.check(done=False)
        (case.here / ".bootfile-other").unlink()
        assert finished(case.start())[0] == 0
        case.check(done=True)
