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
from botocore.exceptions import ResponseStreamingError

from bootfile.receipt import receipt
from bootfile.records import STATES
from common.checkpoint import mirror, output_list
from common.object_store.store import ObjectStore
from launch import manifests
from tests.conftest import ROOT, environment, finish, run, start, wait_until
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
    states = [json.loads(line) for line in (folder / STATES).read_text().splitlines()]
    weights = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.pth")}
    planned = {line["step"]: line["digest"] for line in states if line.get("planned")}
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


def test_the_facts_of_the_table(store, url):
    client, names = store.client(), {"Bucket": store.bucket, "Key": f"{url.partition('//')[2]}/fact"}
    client.put_object(**names, Body=b"1", Metadata={"sha256": "0"})

    def refuse(condition: dict[str, str]) -> str:
        """Return the code with which a write is refused, or ""."""
        try:
            client.put_object(**names, Body=b"2", **condition)
        except client.exceptions.ClientError as error:
            return error.response["Error"]["Code"]
        return ""

    answer = client.head_object(**names)
    assert bool(answer.get("ETag")) == store.etag
    assert bool(answer["Metadata"]) == store.metadata
    assert bool(refuse({"ContentMD5": "1B2M2Y8AsgTpgAmY7PhCfg=="})) == store.md5
    codes = {"kept": "PreconditionFailed", "ignored": "", "refused": "NotImplemented"}
    for condition in ({"IfNoneMatch": "*"}, {"IfMatch": "0" * 32}):
        assert refuse(condition) == codes[store.conditions]


def test_the_table_has_these_facts():
    section = (ROOT / "common" / "README.md").read_text(encoding="utf-8").partition("## Stores\n")[2]
    lines = section.partition("\n## ")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    cells = {row[0]: row[2:] for row in rows}
    for need, name in (
        ("conditional writes", "conditions"), ("ETag", "etag"), ("metadata", "metadata"),
        ("Content-MD5", "md5"),
    ):  # fmt: skip
        facts = [getattr(kind, name) for kind in stores.SERVERS]
        words = {"kept": "yes", True: "yes", "ignored": "ignored", "refused": "501", False: "no"}
        assert [words[fact] for fact in facts] == cells[need], need


def test_upload_and_fetch(store, url, tmp_path):
    files = FILES | {"large": os.urandom(LARGE)}
    folder, count = write(tmp_path / "data", files), len(files)
    variables = environment(**store.environment)
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
    if store.etag or store.metadata:
        return
    client, prefix = store.client(), url.partition(f"//{store.bucket}/")[2]
    client.put_object(Bucket=store.bucket, Key=f"{prefix}/a b", Body=b"4" * 1000)
    (tmp_path / "back" / "a b").unlink()
    said = refused(store, "-m", "launch", "fetch", url, "--to", tmp_path / "back", env=variables)
    assert "is not the file that the list at the URL names" in said
    client.delete_object(Bucket=store.bucket, Key=f"{prefix}/{manifests.NAME}")
    other = write(tmp_path / "other", {"a b": b"5" * 1000})
    said = launch(store, "fetch", url, "--to", other, "--yes").stdout
    assert said.count("replace ") == 1 and f"no digest of {count + 1} of these files" in said
    assert read(other) == files | {"new": b"6", "a b": b"4" * 1000}


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
    said = launch(store, "upload", "--clean", "--to", url, "--keep", "1", "--yes").stdout
    assert f"removed {places[0].rpartition('/')[2]}\n" in said
    with opened(store, url, monkeypatch) as there:
        assert list(there.folders()) == [places[1].rpartition("/")[2]]
        assert [each[:2] for each in there.uploads()] == [("unfinished", upload)] * store.dates
        for _ in range(2):
            there.abort("unfinished", upload)
        assert list(there.uploads()) == []


def fetched(store, url: str, folder: Path) -> Path:
    launch(store, "fetch", url, "--to", folder)
    return folder


def listed(store, url: str) -> dict[str, output_list.File]:
    """Return the complete files at a URL, by the list that a job keeps there; {} if it cannot be read now:
    JuiceFS' gateway cuts off an object that is replaced while it is read, and a job reads it again."""
    with contextlib.suppress(store.client().exceptions.NoSuchKey, ResponseStreamingError):
        return output_list.parse(get(store, url, output_list.NAME))
    return {}


def wait_for_checkpoint(store, url: str, job, above: int = 0) -> int:
    """Wait until the list at the URL names a checkpoint of a later step. Return the step."""
    found = set[int]()

    def is_there() -> bool:
        names = [re.fullmatch(r"checkpoints/step_(\d+)\.pt", path) for path in listed(store, url)]
        found.update(int(name[1]) for name in names if name)
        return max(found, default=0) > above

    wait_until(is_there, job)
    return max(found)


def node(store, scratch: Path, **more: str) -> dict[str, str]:
    """Return the environment of a job on a node with this scratch disk."""
    scratch.mkdir()
    return environment(**store.environment, BOOTFILE_SCRATCH=str(scratch), **more)


def warnings(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("warning: the store")]


def check_warnings(store, printed: str) -> None:
    """If the store cannot keep two jobs apart, one line says so."""
    words = "ignores conditional writes" if store.etag else "returns no ETag"
    lines = warnings(printed)
    assert len(lines) == (store.conditions != "kept") and all(words in line for line in lines), lines


def test_a_paused_job_killed_jobs_and_a_store_that_restarts_cost_no_step(store, url, images, whole, tmp_path):
    """The last node continues after a pause of the first, a kill of the second and a kill of the store."""
    launch(store, "upload", images, "--to", f"{url}/data")
    words, place = (*JOB, f"--data_url={url}/data", f"--train_url={url}/run"), f"{url}/run"
    paused = start(*words, env=node(store, tmp_path / "0"))
    step = wait_for_checkpoint(store, place, paused)
    paused.send_signal(signal.SIGSTOP)
    try:
        killed = start(*words, env=node(store, tmp_path / "1"))
        step = wait_for_checkpoint(store, place, killed, step)
        killed.kill()
        printed = finish(killed, -signal.SIGKILL).stdout
        assert "was last written to by another job" in printed and "and the history up to it" in printed
        check_warnings(store, printed)
        key = f"{place.partition(f'//{store.bucket}/')[2]}/{mirror.KEY}"
        store.client().delete_object(Bucket=store.bucket, Key=key)  # it would be watched for 25 s
        last = start(*words, env=node(store, tmp_path / "2"))
        wait_for_checkpoint(store, place, last, step)
        if store.restarts:
            store.kill()
            time.sleep(1)
            store.restart()
        finish(last)
        ended = results(fetched(store, place, tmp_path / "ended"))
        assert ended == whole
    finally:
        paused.send_signal(signal.SIGCONT)
    assert "nothing more is written" in finish(paused, 6).stderr
    assert results(fetched(store, place, tmp_path / "later")) == whole


# the second of two jobs; if it is late, it finds the results of the first
SECOND = "error: .*(belongs to another job|was deleted, perhaps by another|its --seed is)"


def test_two_jobs_that_start_at_one_url(store, url, tmp_path):
    """One ends with its results at the URL, the other with an error, whatever the store can do."""
    words = ("jobs/train.py", "--dataset=digits", "--width=8", "--max_steps=200", "--save_every=20")
    jobs = [
        start(*words, f"--seed={number}", f"--train_url={url}", env=node(store, tmp_path / str(number)))
        for number in range(2)
    ]
    ended = [finish(job, None) for job in jobs]
    codes = sorted(each.returncode for each in ended)
    assert codes in ([0, 2], [0, 6]) and (codes == [0, 2] or store.conditions != "kept"), ended
    for each in ended:
        if each.returncode:
            assert re.search(SECOND, each.stderr), each.stderr
        else:
            check_warnings(store, each.stdout)
    for path, file in listed(store, url).items():
        assert hashlib.sha256(get(store, url, path)).hexdigest() == file.sha256, path


WRONG = {
    "secret": ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "the secret key does not belong to the access key"),
    "key": (
        {"AWS_ACCESS_KEY_ID": "unknown"},
        "does not know the access key|the secret key does not belong to the access key",
    ),
    "bucket": ({}, r"s3://nothing/x\S*: no such bucket"),
    "clock": ({"FAKETIME": "+3h", "DONT_FAKE_MONOTONIC": "1"}, "the clock of this machine is wrong"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_store_refuses_is_one_line(store, url, tmp_path, case):
    """upload, fetch and both URLs of a job end with exit code 2 and the reason, if the store refuses it."""
    variables, words = WRONG[case]
    if case == "clock":
        if not (libraries := glob.glob(FAKETIME)):
            pytest.skip("libfaketime not found: apt-get install -y libfaketime")
        variables = variables | {"LD_PRELOAD": libraries[0]}
    there = "s3://nothing/x" if case == "bucket" else f"s3://{store.bucket}/x"
    folder = write(tmp_path / "data", {"a": b"1"})
    job = ("jobs/train.py", "--dataset=digits", "--width=8", "--max_steps=2")
    if not {"secret": store.keys, "key": store.keys, "clock": store.clock}.get(case, True):
        env = environment(**store.environment | variables)
        run("-m", "launch", "upload", folder, "--to", there, env=env, fresh=case == "clock")
        return
    for command in (
        ("-m", "launch", "upload", folder, "--to", there),
        ("-m", "launch", "fetch", there, "--to", tmp_path / "back"),
        (*job, f"--train_url={there}"),
        ("jobs/imagenet.py", f"--data_url={there}", "--max_steps=2"),
    ):
        env = environment(**store.environment | variables, BOOTFILE_SCRATCH=str(tmp_path))
        said = refused(store, *command, env=env, fresh=case == "clock")
        assert re.search(words, said), said


def test_a_store_that_is_killed_during_an_upload(store, url, tmp_path):
    if not store.restarts:
        pytest.skip(f"{store.title} keeps its objects in memory")
    files = {str(number): os.urandom(1_500_000) for number in range(120)} | {"large": os.urandom(LARGE)}
    folder = write(tmp_path / "data", files)
    prefix = f"{url.partition(f'//{store.bucket}/')[2]}/"

    def count() -> int:
        return len(store.client().list_objects(Bucket=store.bucket, Prefix=prefix).get("Contents", ()))

    def upload(attempts: str):
        before = count()
        env = environment(**store.environment, BOOTFILE_STORE_ATTEMPTS=attempts)
        job = start("-m", "launch", "upload", folder, "--to", url, env=env)
        wait_until(lambda: count() > before, job)
        store.kill()
        return job

    first = upload("2")
    said = finish(first, 2).stderr
    assert re.search("error: .*(cannot be reached|did not end the answer|stopped answering)", said), said
    store.restart()
    second = upload("20")
    store.restart()
    finish(second)
    assert read(fetched(store, url, tmp_path / "back")) == files


@pytest.mark.parametrize("style", ["path", "virtual"])
def test_an_endpoint_with_a_name(store, url, tmp_path, style):
    """The bucket becomes a part of the host's name if that name resolves, else of the path."""
    if os.geteuid():
        pytest.skip("a private /etc/hosts needs root")
    if not (store.virtual if style == "virtual" else store.named):
        pytest.skip(f"{store.title} does not take this address")
    names = f"{stores.DOMAIN} {store.bucket}.{stores.DOMAIN}" if style == "virtual" else "only.test"
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost {names}\n")
    address = f"http://{names.partition(' ')[0]}:{store.port}"
    env = environment(**store.environment | {"AWS_ENDPOINT_URL_S3": address, "S3_USE_HTTPS": "0"})
    folder = write(tmp_path / "data", FILES)
    script = 'mount --bind "$0" /etc/hosts && exec "$@"'
    for words in (
        ("upload", folder, "--to", f"{url}-{style}"),
        ("fetch", f"{url}-{style}", "--to", tmp_path / "back"),
    ):
        command = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            script,
            tmp_path / "hosts",
            sys.executable,
            "-m",
            "launch",
            *words,
        ]
        ended = subprocess.run(
            list(map(str, command)), env=env, cwd=ROOT, capture_output=True, text=True, timeout=100
        )
        assert ended.returncode == 0, ended.stderr
    assert read(tmp_path / "back") == FILES == read(fetched(store, f"{url}-{style}", tmp_path / "plain"))
