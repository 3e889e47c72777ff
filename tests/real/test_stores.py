"""Upload, fetch, clean and training with S3 servers of five makers: the same results, or one clear line."""

import contextlib
import glob
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.checkpoint import lease, output_list
from common.exact import digest
from common.object_store.store import ObjectStore
from datasets.sampling import receipt
from launch import manifests
from tests.conftest import ROOT, environment, finish, read_until, run, start, wait_until
from tests.real import stores
from tests.support import pictures

pytestmark = pytest.mark.real
pytest.importorskip("boto3", reason="boto3 is not installed")

FAKETIME = "/usr/lib/*/faketime/libfaketime.so.1"  # apt-get install -y libfaketime
LARGE = 9_000_001  # bytes: two parts
FILES = {
    "a b": b"1" * 1000, "中文/文件 ü": b"2" * 3000, "p+q & r": b"3", "100%/50%25": b"4", "empty": b"",
    "sub/deep/'~!$()=@,;:.x": b"5",
}  # fmt: skip
MANY = 1100  # a page of a listing has 1,000 objects
JOB = (
    "jobs/imagenet.py", "--arch=shufflenet_v2_x0_5", "--image_size=32", "--warmup=0", "--print_freq=1",
    "--batch_size=16", "--epochs=8", "--save_every=2", "--data_backend=threads", "--workers=2",
)  # fmt: skip


@pytest.fixture(scope="module", params=stores.SERVERS, ids=lambda kind: kind.__name__)
def store(request, tmp_path_factory):
    if reason := request.param.missing():
        pytest.skip(reason)
    opened = request.param(tmp_path_factory.mktemp(request.param.__name__))
    yield opened
    opened.close()


@pytest.fixture
def url(store, request):
    return f"s3://{store.bucket}/{request.node.originalname}"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for split, count in (("train", 12), ("val", 4)):
        for name in ("a", "b c", "d+e", "100%"):
            pictures.write(folder / split / name, count, (40, 48), "jpg")
    return folder


@pytest.fixture(scope="module")
def whole(images, tmp_path_factory):
    """Return the results of the undisturbed job that reads and writes folders."""
    output = tmp_path_factory.mktemp("whole")
    run(*JOB, "--data_url", images, "--output_dir", output)
    return results(output)


def results(folder: Path) -> tuple[bytes, dict[int, str], dict[str, str]]:
    """Return the receipt, the states of the planned saves, and the sha256 of the weights."""
    states = [json.loads(line) for line in (folder / digest.FILE).read_text().splitlines()]
    weights = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.pth")}
    planned = {line["step"]: line["digest"] for line in states if line["planned"]}
    return (folder / receipt.FILE).read_bytes(), planned, weights


def launch(store, *words: object, code: int = 0, **more: str) -> subprocess.CompletedProcess:
    ended = run("-m", "launch", *words, code=code, env=environment(**store.environment | more))
    assert store.secret not in ended.stdout + ended.stderr
    return ended


def refused(store, *words: object, **options) -> str:
    """Run a command that is refused with exit code 2, and return its error."""
    ended = run(*words, code=2, **options)
    assert ended.stderr.count("error: ") == 1 and "Traceback" not in ended.stderr, ended.stderr
    return ended.stderr[ended.stderr.index("error: ") :]


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != manifests.NAME
    }


def get(store, url: str, name: str) -> bytes:
    """Return an object, read with boto3."""
    key = f"{url.partition(f'//{store.bucket}/')[2]}/{name}"
    return store.client().get_object(Bucket=store.bucket, Key=key)["Body"].read()


@contextlib.contextmanager
def opened(store, url: str, monkeypatch):
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    with ObjectStore(url) as it:
        yield it


def test_upload_and_fetch(store, url, tmp_path):
    files = FILES | {"large": os.urandom(LARGE)}
    folder, count = write(tmp_path / "data", files), len(files)
    said = launch(store, "upload", folder, "--to", url).stdout
    assert f"sent {count} files" in said and said.endswith(f"\n{url}\n")
    for name in (*FILES, "large"):
        assert get(store, url, name) == files[name]
    (folder / "new").write_bytes(b"6")
    again = launch(store, "upload", folder, "--to", url).stdout
    if store.metadata:
        assert "sent 1 file, " in again and f"unchanged {count} files" in again
    else:
        assert f"no sha256 of {count} files of the same size: they were sent again" in again
    assert f"fetched {count + 2} files" in launch(store, "fetch", url, "--to", tmp_path / "back").stdout
    assert read(tmp_path / "back") == files | {"new": b"6"}
    back = launch(store, "fetch", url, "--to", tmp_path / "back").stdout
    assert "fetched 0 files" in back and "no digest" not in back


def test_a_listing_of_several_pages(store, url, tmp_path, monkeypatch):
    folder = write(tmp_path / "data", {f"{n:04}": b"%d" % n for n in range(MANY)})
    launch(store, "upload", folder, "--to", url)
    with opened(store, url, monkeypatch) as there:
        assert sorted(each.key for each in there.list()) == [*sorted(os.listdir(folder)), manifests.NAME]


def test_clean(store, url, tmp_path, monkeypatch):
    """Old snapshots are deleted. An upload that did not end is found, and stays for a day."""
    places = []
    for number in range(2):
        files = {"jobs/train.py": b"print(%d)\n" % number, "common/__init__.py": b""}
        text = manifests.to_bytes(manifests.describe("train", files, "jobs/train.py"))
        folder = write(tmp_path / str(number), files | {manifests.NAME: text})
        places.append(launch(store, "upload", folder, "--to", url).stdout.splitlines()[-1])
        time.sleep(1.1)  # stores give whole seconds
    client, key = store.client(), f"{url.partition(f'//{store.bucket}/')[2]}/unfinished"
    upload = client.create_multipart_upload(Bucket=store.bucket, Key=key)["UploadId"]
    client.upload_part(Bucket=store.bucket, Key=key, UploadId=upload, PartNumber=1, Body=b"x")
    said = launch(store, "clean", url, "--keep", "1", "--yes").stdout
    assert f"removed {places[0].rpartition('/')[2]}\n" in said
    with opened(store, url, monkeypatch) as there:
        assert list(there.folders()) == [places[1].rpartition("/")[2]]
        assert [each[:2] for each in there.uploads()] == [("unfinished", upload)] * store.dates
        for _ in range(2):
            there.abort("unfinished", upload)
        assert list(there.uploads()) == []
