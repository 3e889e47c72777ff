"""`upload`, `fetch` and `clean` work with a real S3 server."""

import hashlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from launch import manifests
from launch import records as job_records
from tests.conftest import ROOT, environment, finish, run, start, wait_until
from tests.support.fault_proxy import FaultProxy
from tests.support.hostile_store import HostileStore, listing
from tests.support.object_store_server import ObjectStoreServer

pytest.importorskip("boto3", reason="boto3 is not installed")
pytest.importorskip("moto", reason="moto is not installed")


@pytest.fixture(scope="module")
def server():
    with ObjectStoreServer("bucket") as running:
        yield running


@pytest.fixture
def url(request):
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    return f"s3://bucket/{name}-{os.urandom(4).hex()}"  # if a test runs again, it finds no objects


def launch(server, *arguments, code=0, timeout=60, **more):
    result = run(
        "-m", "launch", *arguments, code=code, timeout=timeout, env=environment(**(server.environment | more))
    )
    if code == 2:
        assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1, result.stderr
    assert "testing-secret" not in result.stdout + result.stderr
    return result


def folder_of(path, files: dict[str, bytes]):
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def contents(path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


def keys(server, url) -> dict[str, bytes]:
    """Return the objects below a URL, read with boto3."""
    client, prefix = server.client(), url.split("/", 3)[3] + "/"
    entries = client.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
    return {
        entry["Key"][len(prefix) :]: client.get_object(Bucket="bucket", Key=entry["Key"])["Body"].read()
        for entry in entries
    }


def sealed(files: dict[str, bytes], name="train", job="jobs/train.py") -> dict:
    """Return a manifest as `pack` writes it."""
    entries = [
        {"path": path, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for path, content in sorted(files.items())
    ]
    return manifests.make(name, entries, job)


def put(server, url, files: dict[str, bytes]) -> None:
    client, prefix = server.client(), url.split("/", 3)[3]
    for name, content in files.items():
        client.put_object(Bucket="bucket", Key=f"{prefix}/{name}", Body=content)


def unfinished(server) -> list[str]:
    return [
        each["Key"] for each in server.client().list_multipart_uploads(Bucket="bucket").get("Uploads", [])
    ]


FILES = {"a": b"1" * 1000, "sub/ü b": b"", "sub/deep/c": b"2" * 5000, "big": bytes(9_000_000)}


def test_data_go_there_and_come_back(server, url, tmp_path):
    folder = folder_of(tmp_path / "data", FILES)
    said = launch(server, "upload", folder, "--to", url)
    assert "sent 4 files, 9.0 MB" in said.stdout and said.stdout.endswith(f"\n{url}\n")
    there = keys(server, url)
    manifest = json.loads(there.pop("manifest.json"))
    assert there == FILES
    assert manifests.parse(json.dumps(manifest).encode()) == manifest
    assert {file["path"]: file["sha256"] for file in manifest["files"]} == {
        path: hashlib.sha256(content).hexdigest() for path, content in FILES.items()
    }
    assert contents(folder) == FILES  # nothing was written here

    time.sleep(1.1)  # the server's times have a resolution of one second
    folder_of(folder, {"a": b"3" * 1000, "new": b"4"})
    (folder / "sub/deep/c").unlink()
    with FaultProxy(server.port) as proxy:
        said = launch(server, "upload", folder, "--to", url, **proxy.environment)
        # list, read and delete the manifest, two files, the manifest; HEAD of files with the manifest's time
        assert proxy.requests <= 6 + 3
    assert "sent 2 files, 1.0 kB" in said.stdout and "unchanged 2 files, 9.0 MB" in said.stdout
    assert "kept 1 objects" in said.stdout and "sub/deep/c" in said.stdout
    server.client().put_object(Bucket="bucket", Key=f"{url.split('/', 3)[3]}/a\x1b[2J", Body=b"")
    said = launch(server, "upload", folder, "--to", url)
    assert "sent 0 files" in said.stdout and "first: a\\x1b[2J" in said.stdout
    server.client().delete_object(Bucket="bucket", Key=f"{url.split('/', 3)[3]}/a\x1b[2J")

    back = tmp_path / "back"
    said = launch(server, "fetch", url, "--to", back)
    here = contents(back)
    here.pop("manifest.json")
    assert here == FILES | {"a": b"3" * 1000, "new": b"4"}
    folder_of(back, {"a": b"5" * 1000, "own": b"6"})
    said = launch(server, "fetch", url, "--to", back, "--yes")
    assert "fetched 1 file, 1.0 kB" in said.stdout
    assert (back / "a").read_bytes() == b"3" * 1000 and (back / "own").exists()


def test_a_snapshot_has_a_folder_of_its_own(server, url, tmp_path):
    files = {"jobs/train.py": b"print(1)\n", "common/__init__.py": b""}
    manifest = sealed(files)
    folder = folder_of(tmp_path / "snapshot", files | {"manifest.json": manifests.to_bytes(manifest)})
    folder_of(folder, {"jobs/__pycache__/train.pyc": b"x"})
    said = launch(server, "upload", folder, "--to", f"{url}/")
    place = f"{url}/train-{manifest['digest'][:12]}"
    assert said.stdout.splitlines()[-1] == place
    there = keys(server, place)
    assert json.loads(there.pop("manifest.json")) == manifest
    assert there == files
    (folder / "jobs/train.py").write_bytes(b"print(2)\n")
    said = launch(server, "upload", folder, "--to", f"{url}/other", code=2)
    assert "jobs/train.py has changed since" in said.stderr
    assert "manifest.json" not in keys(server, f"{url}/other/train-{manifest['digest'][:12]}")


def test_what_cannot_be_uploaded(server, url, tmp_path):
    data = folder_of(tmp_path / "data", {"a": b"1"})
    for arguments, words in (
        ([tmp_path / "nothing", "--to", url], "is not a folder"),
        ([data, "--to", "s3://my.bucket/x"], "dots"),
        ([data, "--to", "/folder"], "is not s3://"),
        ([data, "--to", "s3://nothing/x"], "s3://nothing/x: no such bucket"),
        ([folder_of(tmp_path / "empty", {}) or data, "--to"], "expected one argument"),
    ):
        assert words in launch(server, "upload", *arguments, code=2).stderr
    (tmp_path / "none").mkdir()
    assert "contains no files" in launch(server, "upload", tmp_path / "none", "--to", url, code=2).stderr
    folder_of(tmp_path / "other", {"manifest.json": b"{}", "a": b""})
    assert (
        "not a manifest that `pack` made"
        in launch(server, "upload", tmp_path / "other", "--to", url, code=2).stderr
    )
    (data / "link").symlink_to(tmp_path)
    assert "a link to a folder" in launch(server, "upload", data, "--to", url, code=2).stderr
    (data / "link").unlink()
    (data / "a\nb").write_text("")
    assert "control character" in launch(server, "upload", data, "--to", url, code=2).stderr
    (data / "a\nb").unlink()
    put(server, url, {"manifest.json": b"of another program"})
    assert "not written by `upload`" in launch(server, "upload", data, "--to", url, code=2).stderr
    assert keys(server, url) == {"manifest.json": b"of another program"}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_upload_that_was_ended_goes_on(server, url, tmp_path, how):
    big = os.urandom(40_000_000)
    folder = folder_of(tmp_path / "data", {f"{n:02}": os.urandom(1000) for n in range(20)} | {"big": big})
    with FaultProxy(server.port, held="partNumber") as proxy:
        job = start(
            "-m", "launch", "upload", folder, "--to", url,
            env=environment(**server.environment | proxy.environment),
        )  # fmt: skip
        wait_until(lambda: proxy.holding, job)
        job.send_signal(how)
        # after Ctrl-C, requests may take longer than the 3 s in which a command without clean-up ends
        threading.Timer(4 if how == signal.SIGINT else 0, proxy.released.set).start()
        ended = finish(job, code=130 if how == signal.SIGINT else -9)
    if how == signal.SIGINT:
        assert ended.stderr.splitlines()[-1] == "interrupted: start it again to continue"
        assert "Traceback" not in ended.stderr
        assert unfinished(server) == []
    assert "manifest.json" not in keys(server, url)
    assert keys(server, url).get("big") in (None, big)
    launch(server, "upload", folder, "--to", url)
    there = keys(server, url)
    assert there.pop("manifest.json")
    assert there == contents(folder)
    assert unfinished(server) == []


def outputs(steps: list[int]) -> dict[str, bytes]:
    """Return the outputs as a job uploads them, without the list."""
    files = {"metrics.jsonl": b'{"step": 1}\n', "best.pth": b"weights"}
    for step in steps:
        files[f"checkpoints/step_{step}.pt"] = os.urandom(1000)
        files[f"checkpoints/step_{step}.pt.json"] = b"{}"
    return files


def listed(files: dict[str, bytes]) -> dict[str, bytes]:
    entries = sealed(files)["files"]
    return {".bootfile-outputs.json": json.dumps({"format": 1, "files": entries, "step": 1}).encode()}


def test_outputs_come_with_the_newest_checkpoint_by_number(server, url, tmp_path):
    files = outputs([90, 100, 1000])
    put(server, url, files)
    put(server, url, {"checkpoints/step_2000.pt": b"half"})  # its checksum is missing
    said = launch(server, "fetch", url, "--to", tmp_path / "latest", "--latest_checkpoint")
    assert "checkpoint checkpoints/step_1000.pt\n" in said.stdout
    newest = ("metrics.jsonl", "checkpoints/step_1000.pt", "checkpoints/step_1000.pt.json")
    assert contents(tmp_path / "latest") == {name: files[name] for name in newest}
    # if there is a list of the complete files, other files are incomplete
    files |= listed({name: content for name, content in files.items() if "1000" not in name})
    put(server, url, {".bootfile-outputs.json": files[".bootfile-outputs.json"]})
    said = launch(server, "fetch", url, "--to", tmp_path / "latest2", "--latest_checkpoint")
    assert "checkpoint checkpoints/step_100.pt\n" in said.stdout
    said = launch(server, "fetch", url, "--to", tmp_path / "all")
    files.pop(".bootfile-outputs.json")
    assert contents(tmp_path / "all") == files | {"checkpoints/step_2000.pt": b"half"}


def test_outputs_that_are_not_as_listed(server, url, tmp_path):
    files = outputs([1])
    marker = listed(files | {"gone.pth": b"gone"})
    put(server, url, files | marker | {"metrics.jsonl": b'{"step": 3}\n'})  # files of a job that is running
    damaged = {"Body": b"damaged", "Metadata": {"sha256": "0" * 64}}
    server.client().put_object(Bucket="bucket", Key=f"{url.split('/', 3)[3]}/damaged", **damaged)
    said = launch(
        server, "fetch", url, "--to", tmp_path / "damaged", code=2, BOOTFILE_STORE_ATTEMPTS="2"
    )  # fmt: skip
    assert f"{url}/damaged: the received bytes are not those that were sent" in said.stderr
    assert not (tmp_path / "damaged" / "damaged").exists()
    server.client().delete_object(Bucket="bucket", Key=f"{url.split('/', 3)[3]}/damaged")
    said = launch(server, "fetch", url, "--to", tmp_path / "back", code=1)
    assert "listed, but not in the store: 1 files, first: gone.pth" in said.stdout
    assert contents(tmp_path / "back") == files | {"metrics.jsonl": b'{"step": 3}\n'}
    deep, none = b"[" * 100_000, b'{"files": [{"path": 5, "size": 1, "sha256": "%s"}]}' % (b"0" * 64)
    put(server, url, {".bootfile-outputs.json": none, "manifest.json": deep})
    assert "2 files" not in launch(server, "fetch", url, "--to", tmp_path / "back").stderr


def test_files_of_another_content_are_replaced_after_a_yes_only(server, url, tmp_path):
    files = outputs([1])
    put(server, url, files)
    own = {"metrics.jsonl": b"my own", "best.pth": b"mine", "notes": b"stay"}
    folder_of(tmp_path, own)
    said = launch(server, "fetch", url, "--to", tmp_path, code=2)
    assert "pass --yes to replace 2 files" in said.stderr
    assert contents(tmp_path) == own
    answered = on_a_terminal(server, "n", "fetch", url, "--to", tmp_path)
    assert answered[0] == 1 and f"replace {tmp_path}/best.pth" in answered[1]
    assert contents(tmp_path) == own
    launch(server, "fetch", url, "--to", tmp_path, "--yes")
    assert contents(tmp_path) == files | {"notes": b"stay"}
    assert on_a_terminal(server, "", "fetch", url, "--to", tmp_path)[0] == 0, "no question"


def test_the_newest_checkpoint_of_one_run(server, url, tmp_path):
    runs = {f"{name}/{path}": content for name in ("old", "new") for path, content in outputs([9]).items()}
    put(server, url, runs)
    said = launch(server, "fetch", url, "--to", tmp_path / "no", "--latest_checkpoint", code=2)
    assert f"{url} holds 2 runs: fetch from one of {url}/new, {url}/old" in said.stderr
    put(server, url, outputs([2]))
    said = launch(server, "fetch", url, "--to", tmp_path / "own", "--latest_checkpoint")
    assert "checkpoint checkpoints/step_2.pt\n" in said.stdout
    said = launch(server, "fetch", f"{url}/old/", "--to", tmp_path / "one", "--latest_checkpoint")
    assert "checkpoint checkpoints/step_9.pt\n" in said.stdout


def test_a_fetch_that_was_killed_goes_on(server, url, tmp_path):
    files = {f"{number:02}": os.urandom(1000) for number in range(20)} | {"big": os.urandom(40_000_000)}
    put(server, url, files)
    back = tmp_path / "back"
    with FaultProxy(server.port, held="/big", passed=4) as proxy:
        job = start(
            "-m", "launch", "fetch", url, "--to", back,
            env=environment(**server.environment | proxy.environment),
        )  # fmt: skip
        wait_until(
            lambda: proxy.holding and any(each.stat().st_size for each in back.glob(".partial-*")), job
        )
        job.kill()
        finish(job, code=-9)
    assert not (back / "big").exists()
    for name, content in contents(back).items():
        assert name.startswith(".partial-") or content == files[name]
    folder_of(back, {".partial-0123456789abcdef": b"part of a deleted object"})
    with FaultProxy(server.port) as proxy:
        said = launch(server, "fetch", url, "--to", back, **proxy.environment)
    assert contents(back) == files
    assert "unchanged" in said.stdout


@pytest.mark.parametrize(
    "key", ["../x", "/x", "a/../../x", "a\\x"], ids=["parent", "absolute", "below", "backslash"]
)
def test_hostile_keys_do_not_escape(server, url, tmp_path, key):
    put(server, url, {"fine": b"1", key: b"2"})
    said = launch(server, "fetch", url, "--to", tmp_path / "in" / "back", code=2)
    assert f"key {key if key.isprintable() else ascii(key)}" in said.stderr
    assert contents(tmp_path) == {}


def test_a_url_without_results(server, url, tmp_path):
    """A job has begun, and has not saved anything yet."""
    put(server, url, {".bootfile-lease.json": b"{}", ".bootfile-outputs.json": b'{"format": 1, "files": []}'})
    said = launch(server, "fetch", url, "--to", tmp_path / "to", code=2)
    assert f"no results below {url}" in said.stderr and not (tmp_path / "to").exists()
    entry = {"path": "best.pth", "size": 1, "sha256": "0" * 64}
    put(server, url, {".bootfile-outputs.json": json.dumps({"format": 1, "files": [entry]}).encode()})
    said = launch(server, "fetch", url, "--to", tmp_path / "to", code=1)
    assert "not in the store: 1 files, first: best.pth" in said.stdout


def test_keys_outside_of_the_url_are_refused(server, url, tmp_path):
    folder_of(tmp_path / "data", {"a": b"1"})
    with HostileStore(lambda *_: listing("/etc/passwd")) as hostile:
        more = hostile.environment | {"BOOTFILE_STORE_ATTEMPTS": "1"}
        for command in (("fetch", url, "--to", tmp_path / "to"), ("upload", tmp_path / "data", "--to", url)):
            said = launch(server, *command, code=2, **more)
            assert "lists /etc/passwd" in said.stderr and not (tmp_path / "to").exists()
        assert "lists /etc/passwd" in launch(server, "clean", url, code=2, **more).stderr


def test_files_and_folders_in_each_others_way(server, url, tmp_path):
    put(server, url, {"a/b": b"1"})
    folder_of(tmp_path / "back", {"a": b"file"})
    assert "its folder is a file" in launch(server, "fetch", url, "--to", tmp_path / "back", code=2).stderr
    folder_of(tmp_path / "back2", {"a/b/c": b"file"})
    assert "is a folder" in launch(server, "fetch", url, "--to", tmp_path / "back2", code=2).stderr
    assert "no objects below" in launch(server, "fetch", f"{url}/x", "--to", tmp_path, code=2).stderr


def snapshots(server, url, count: int, name="train") -> list[str]:
    """Upload snapshots, one per second, and return their folders, oldest first."""
    found = []
    for number in range(count):
        files = {"jobs/train.py": f"print({number})".encode()}
        manifest = sealed(files, name)
        place = manifests.make_folder_name(manifest)
        put(server, f"{url}/{place}", files | {"manifest.json": manifests.to_bytes(manifest)})
        found.append(place)
        time.sleep(1.1 * (number + 1 < count))
    return found


def test_clean_removes_what_it_showed_and_nothing_else(server, url, tmp_path):
    oldest, old, new = snapshots(server, url, 3)
    others = {
        "outputs/.bootfile-outputs.json": b"{}", "outputs/checkpoints/step_1.pt": b"1",
        "data/manifest.json": b"{}", "train-0123456789ab/jobs/train.py": b"no manifest",
        f"{oldest}/own": b"not in the manifest",
        "train-ba9876543210/manifest.json": manifests.to_bytes(sealed({"a": b""})),
        "manifest.json": manifests.to_bytes(sealed({"outputs/checkpoints/step_1.pt": b"1"})),
    }  # fmt: skip
    put(server, url, others)
    server.client().create_multipart_upload(Bucket="bucket", Key=f"{url.split('/', 3)[3]}/outputs/big")
    before = keys(server, url)
    said = launch(server, "clean", url, "--keep", "1", code=2)
    assert "pass --yes to remove 2 snapshots" in said.stderr
    table = {line.split()[2]: line.split()[0] for line in said.stdout.splitlines()}
    assert table == {oldest: "remove", old: "remove", new: "keep", "outputs/big": "remove"}
    assert keys(server, url) == before
    assert "nothing to remove" in launch(server, "clean", f"{url}/outputs/checkpoints").stdout
    said = launch(server, "clean", url, "--older_than", "1", "--keep", "1", "--yes")
    assert "removed 0 snapshots (0 B) and 1 unfinished uploads" in said.stdout
    assert keys(server, url) == before and unfinished(server) == []

    answered = on_a_terminal(server, "no", "clean", url, "--keep", "1")
    assert answered[0] == 1 and "nothing was removed" in answered[1] and keys(server, url) == before
    answered = on_a_terminal(server, "y", "clean", url, "--keep", "2")
    assert answered[0] == 0 and f"removed {oldest}" in answered[1]
    launch(server, "clean", url, "--keep", "1", "--yes")
    assert keys(server, url) == others | {
        name: content for name, content in before.items() if name.startswith(new)
    }


def on_a_terminal(server, answer: str, *arguments) -> tuple[int, str]:
    """Return (exit code, output) of a verb whose user types an answer."""
    ours, theirs = pty.openpty()
    job = subprocess.Popen(
        [sys.executable, "-m", "launch", *arguments], cwd=ROOT, env=environment(**server.environment),
        stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    shown, _ = job.communicate(timeout=60)
    os.close(ours)
    return job.returncode, shown


def test_a_job_s_record_stands_for_its_output(server, url, tmp_path):
    launch(server, "upload", folder_of(tmp_path / "out", {"metrics.jsonl": b"{}\n"}), "--to", url)
    record, place = {"id": "17", "endpoint": "https://127.0.0.1", "project_id": "p"}, tmp_path / "records"
    job_records.write(str(place / "run-1.json"), record | {"outputs": {"train_url": url}})
    job_records.write(str(place / "run-2.json"), record | {"id": "18", "outputs": {"other": url}})
    for number, name in enumerate((place / "run-1.json", "run-1", "17")):
        to = tmp_path / str(number)
        launch(server, "fetch", name, "--to", to, BOOTFILE_JOBS=str(place))
        assert (to / "metrics.jsonl").read_bytes() == b"{}\n"
    said = launch(server, "fetch", "run-2", "--to", tmp_path / "no", code=2, BOOTFILE_JOBS=str(place)).stderr
    assert "run-2: that job has no output train_url (outputs: other)" in said
    job_records.write(str(place / "run-3.json"), record | {"id": "19", "outputs": ["train_url"]})
    for name in ("../x", "nosuch", "run-3"):
        said = launch(server, "fetch", name, "--to", tmp_path / "no", code=2, BOOTFILE_JOBS=str(place)).stderr
        assert name in said and "MODELARTS" not in said
