"""`upload`, its `--clean`, and `fetch` work with a real S3 server."""

import contextlib
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from bootfile.ground.errors import BadInput
from common.ground import endings
from common.object_store.store import Object
from launch import manifests
from launch import records as job_records
from launch.transfer import fetch, upload
from tests.conftest import environment, finish, start, wait_until
from tests.support.fault_proxy import FaultProxy
from tests.support.terminal import Terminal

pytest.importorskip("boto3", reason="boto3 is not installed")
pytest.importorskip("moto", reason="moto is not installed")
VERBS = {"upload": upload, "fetch": fetch}


@pytest.fixture
def url(request):
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    return f"s3://bucket/{name}-{os.urandom(4).hex()}"  # if a test runs again, it finds no objects


@pytest.fixture
def launch(server, monkeypatch, capsys):
    """A function that runs a verb in this process, and returns its CompletedProcess."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)

    def call(verb, *arguments, code=0, answer=None, **more):
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO() if answer is None else Terminal(f"{answer}\n"))
            for name, value in more.items():
                patch.setenv(name, value)
            try:
                ended = VERBS[verb].main([*map(str, arguments)])
            except BadInput as error:
                endings.say_error(str(error))
                ended = error.code
        output, errors = capsys.readouterr()
        assert ended == code, output + errors
        if code == 2:
            assert errors.startswith("error: ") and len(errors.splitlines()) == 1, errors
        assert "testing-secret" not in output + errors
        return subprocess.CompletedProcess(arguments, ended, output, errors)

    return call


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


def put(server, url, files: dict[str, bytes]) -> None:
    client, prefix = server.client(), url.split("/", 3)[3]
    for name, content in files.items():
        client.put_object(Bucket="bucket", Key=f"{prefix}/{name}", Body=content)


def unfinished(server) -> list[str]:
    return [
        each["Key"] for each in server.client().list_multipart_uploads(Bucket="bucket").get("Uploads", [])
    ]


FILES = {"a": b"1" * 1000, "sub/ü b": b"", "sub/deep/c": b"2" * 5000, "big": bytes(9_000_000)}


def test_data_go_there_and_come_back(server, url, tmp_path, launch):
    folder = folder_of(tmp_path / "data", FILES)
    said = launch("upload", folder, "--to", url)
    assert "sent 4 files, 9.01MB" in said.stdout and said.stdout.endswith(f"\n{url}\n")
    there = keys(server, url)
    manifest = json.loads(there.pop("manifest.json"))
    assert there == FILES
    assert manifests.parse(json.dumps(manifest).encode()) == manifest
    assert {file["path"]: file["sha256"] for file in manifest["files"]} == {
        path: hashlib.sha256(content).hexdigest() for path, content in FILES.items()
    }
    assert contents(folder) == FILES  # nothing was written here

    folder_of(folder, {"a": b"3" * 1000, "new": b"4"})
    (folder / "sub/deep/c").unlink()
    with FaultProxy(server.port) as proxy:
        said = launch("upload", folder, "--to", url, **proxy.environment)
        # list, read and delete the manifest, two files, the manifest; HEAD of the files with the same size
        assert proxy.requests <= 6 + 3
    assert "sent 2 files, 1.00kB" in said.stdout and "unchanged 2 files, 9.00MB" in said.stdout
    assert "kept 1 objects" in said.stdout and "sub/deep/c" in said.stdout
    server.client().put_object(Bucket="bucket", Key=f"{url.split('/', 3)[3]}/a\x1b[2J", Body=b"")
    said = launch("upload", folder, "--to", url)
    assert "sent 0 files" in said.stdout and "first: a\\x1b[2J" in said.stdout
    server.client().delete_object(Bucket="bucket", Key=f"{url.split('/', 3)[3]}/a\x1b[2J")

    back = tmp_path / "back"
    launch("fetch", url, "--to", back)
    here = contents(back)
    here.pop("manifest.json")
    assert here == FILES | {"a": b"3" * 1000, "new": b"4"}


def test_a_snapshot_has_a_folder_of_its_own(server, url, tmp_path, launch):
    files = {"jobs/train.py": b"print(1)\n", "common/__init__.py": b""}
    manifest = manifests.describe("train", files, "jobs/train.py")
    folder = folder_of(tmp_path / "snapshot", files | {"manifest.json": manifests.to_bytes(manifest)})
    folder_of(folder, {"jobs/__pycache__/train.pyc": b"x"})
    said = launch("upload", folder, "--to", f"{url}/")
    place = f"{url}/train-{manifest['digest'][:12]}"
    assert said.stdout.splitlines()[-1] == place
    there = keys(server, place)
    assert json.loads(there.pop("manifest.json")) == manifest
    assert there == files
    (folder / "jobs/train.py").write_bytes(b"print(2)\n")
    said = launch("upload", folder, "--to", f"{url}/other", code=2)
    assert "jobs/train.py has changed since" in said.stderr
    assert "manifest.json" not in keys(server, f"{url}/other/train-{manifest['digest'][:12]}")


def test_what_cannot_be_uploaded(server, url, tmp_path, launch):
    data, link = folder_of(tmp_path / "data", {"a": b"1"}), folder_of(tmp_path / "link", {"a": b"1"})
    (link / "b").symlink_to(tmp_path)
    (tmp_path / "none").mkdir()
    for folder, to, words in (
        (tmp_path / "nothing", url, "is not a folder"),
        (data, "s3://my.bucket/x", "dots"),
        (data, "/folder", "is not s3://"),
        (data, "s3://nothing/x", "s3://nothing/x: no such bucket"),
        (tmp_path / "none", url, "contains no files"),
        (folder_of(tmp_path / "other", {"manifest.json": b"{}"}), url, "not a manifest"),
        (link, url, "neither a regular file"),
        (folder_of(tmp_path / "line", {"a\nb": b""}), url, "control character"),
    ):
        assert words in launch("upload", folder, "--to", to, code=2).stderr
    put(server, url, {"manifest.json": b"of another program"})
    assert "not written by `upload`" in launch("upload", data, "--to", url, code=2).stderr
    assert keys(server, url) == {"manifest.json": b"of another program"}


@pytest.mark.thorough
def test_an_upload_that_was_interrupted_goes_on(server, url, tmp_path, launch):
    big = os.urandom(40_000_000)
    folder = folder_of(tmp_path / "data", {f"{n:02}": os.urandom(1000) for n in range(20)} | {"big": big})
    with FaultProxy(server.port, held="partNumber") as proxy:
        job = start(
            "-m", "launch", "upload", folder, "--to", url,
            env=environment(**server.environment | proxy.environment),
        )  # fmt: skip
        wait_until(lambda: proxy.holding, job)
        job.send_signal(signal.SIGINT)
        # after Ctrl-C, requests may take longer than the 3 s in which a command without clean-up ends
        threading.Timer(4, proxy.released.set).start()
        assert finish(job, code=130).stderr.splitlines()[-1] == "error: interrupted"
    assert unfinished(server) == []
    assert "manifest.json" not in keys(server, url)
    launch("upload", folder, "--to", url)
    there = keys(server, url)
    assert there.pop("manifest.json") and there == contents(folder)


OUTPUTS = {  # as a job uploads them, without the list
    "metrics.jsonl": b'{"step": 1}\n', "best.pth": b"weights", "checkpoints/step_1.pt": os.urandom(1000),
    "checkpoints/step_1.pt.json": b"{}",
}  # fmt: skip


def test_damaged_objects_are_not_fetched_and_lists_stay(server, url, tmp_path, launch):
    put(server, url, OUTPUTS | {".bootfile-outputs.json": b"{}"})
    damaged = {"Body": b"damaged", "Metadata": {"sha256": "0" * 64}}
    server.client().put_object(Bucket="bucket", Key=f"{url.split('/', 3)[3]}/damaged", **damaged)
    said = launch(
        "fetch", url, "--to", tmp_path / "damaged", code=2, BOOTFILE_STORE_ATTEMPTS="2"
    )  # fmt: skip
    assert re.search(f"{url}/damaged: .*received .*not ", said.stderr)
    assert not (tmp_path / "damaged" / "damaged").exists()
    server.client().delete_object(Bucket="bucket", Key=f"{url.split('/', 3)[3]}/damaged")
    launch("fetch", url, "--to", tmp_path / "back")
    assert contents(tmp_path / "back") == OUTPUTS


def test_files_of_another_content_are_replaced_after_a_yes_only(server, url, tmp_path, launch):
    put(server, url, OUTPUTS)
    own = {"metrics.jsonl": b"my own", "best.pth": b"mine", "notes": b"stay"}
    folder_of(tmp_path, own)
    said = launch("fetch", url, "--to", tmp_path, code=2)
    assert "pass --yes to replace 2 files" in said.stderr
    assert contents(tmp_path) == own
    said = launch("fetch", url, "--to", tmp_path, answer="n", code=1)
    assert f"replace {tmp_path}/best.pth" in said.stdout
    assert contents(tmp_path) == own
    assert "fetched 4 files" in launch("fetch", url, "--to", tmp_path, "--yes").stdout
    assert contents(tmp_path) == OUTPUTS | {"notes": b"stay"}
    assert "unchanged 4 files" in launch("fetch", url, "--to", tmp_path).stdout, "no question"


def test_settings_in_the_home_folder_are_not_fetched(server, url, tmp_path, launch, monkeypatch):
    home = tmp_path / "me"
    folder_of(home / ".local", {"kept": b"1"})
    monkeypatch.setenv("HOME", str(home))
    put(server, url, {"me/.ssh/authorized_keys": b"key", "me/a": b"1"})
    said = launch("fetch", url, "--to", tmp_path, "--yes", code=2).stderr
    assert "me/.ssh/authorized_keys, a setting of this user" in said and not (home / "a").exists()
    for own in (home / "results", home / ".local" / "results"):
        launch("fetch", url, "--to", own)
        assert (own / "me/.ssh/authorized_keys").read_bytes() == b"key"


@pytest.mark.parametrize(("objects", "here", "message"), [
    ({"a": b"1", "../x": b"2"}, {}, "key ../x"),
    ({"a/b": b"1"}, {"a": b"file"}, "its folder is a file"),
    ({"a/b": b"1"}, {"a/b/c": b"file"}, "Is a directory"),
    ({".bootfile-lease.json": b"{}"}, {}, "no files below"),
])  # fmt: skip
def test_what_cannot_be_fetched(server, url, tmp_path, launch, objects, here, message):
    put(server, url, objects)
    folder_of(tmp_path / "in" / "back", here)
    assert message in launch("fetch", url, "--to", tmp_path / "in" / "back", code=2).stderr
    assert contents(tmp_path) == {f"in/back/{name}": content for name, content in here.items()}


def snapshots(server, url, count: int, name="train") -> list[str]:
    """Upload snapshots, one per second, and return their folders, oldest first."""
    found = []
    for number in range(count):
        files = {"jobs/train.py": f"print({number})".encode()}
        manifest = manifests.describe(name, files, "jobs/train.py")
        place = manifests.make_folder_name(manifest)
        put(server, f"{url}/{place}", files | {"manifest.json": manifests.to_bytes(manifest)})
        found.append(place)
        time.sleep(1.1 * (number + 1 < count))
    return found


class _Store(contextlib.nullcontext):
    """The parts of an ObjectStore that --clean uses. objects: key -> content, the later the newer."""

    def __init__(self, objects: dict[str, bytes], uploads: dict[str, float]):
        super().__init__(self)
        self.objects, self.unfinished = objects, uploads
        self.deleted: list[str] = []

    def folders(self):
        return dict.fromkeys(key.partition("/")[0] for key in self.objects if "/" in key)

    def head(self, key):
        seconds = [*self.objects].index(key) + 1.0 if key in self.objects else 0.0
        return Object(key, 1, modified=seconds) if seconds else None

    def read(self, key):
        return self.objects[key]

    def uploads(self):
        return [(key, f"id of {key}", began) for key, began in self.unfinished.items()]

    def abort(self, key, id):
        assert id == f"id of {key}"
        del self.unfinished[key]

    def delete(self, keys):
        self.deleted += keys


def test_clean_keeps_the_newest_snapshots_of_each_name(monkeypatch, capsys):
    objects, places = {}, []
    for name, number in (("a", 0), ("b", 1), ("a", 2), ("a", 3)):
        manifest = manifests.describe(name, {"jobs/train.py": b"%d" % number}, "jobs/train.py")
        places.append(manifests.make_folder_name(manifest))
        objects[f"{places[-1]}/manifest.json"] = manifests.to_bytes(manifest)
    data = manifests.describe("data", {"image": b"1"})  # of an upload of data
    objects[f"{manifests.make_folder_name(data)}/manifest.json"] = manifests.to_bytes(data)
    objects["elsewhere/manifest.json"] = objects[f"{places[0]}/manifest.json"]  # not its own folder
    now = time.time()
    store = _Store(objects, {"old": now - 86500, "running": now - 86000})
    monkeypatch.setattr(upload, "ObjectStore", lambda url: store)
    words = ["--clean", "--to", "s3://bucket/code", "--keep", "2"]
    with pytest.raises(BadInput, match=r"1 snapshots .* and 1 unfinished"):
        upload.main(words)  # there is no terminal
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {line[2]: line[0] for line in lines} == {
        places[0]: "remove", places[1]: "keep", places[2]: "keep", places[3]: "keep",
        "old": "remove", "running": "keep",
    }  # fmt: skip
    assert not store.deleted and len(store.unfinished) == 2
    assert upload.main([*words, "--yes"]) == 0
    assert store.deleted == [f"{places[0]}/jobs/train.py", f"{places[0]}/manifest.json"]
    assert [*store.unfinished] == ["running"]
    store.deleted = []
    assert upload.main(["--clean", "--to", "s3://bucket/code", "--yes"]) == 0  # three of each name stay
    assert not store.deleted and "nothing to remove" in capsys.readouterr().out


@pytest.mark.thorough
def test_clean_removes_what_it_showed_and_nothing_else(server, url, launch, monkeypatch):
    oldest, old, new = snapshots(server, url, 3)
    stranger = manifests.to_bytes(manifests.describe("train", {"a": b""}, "jobs/train.py"))
    results = manifests.describe("train", {"outputs/checkpoints/step_1.pt": b"1"}, "jobs/train.py")
    others = {
        "outputs/.bootfile-outputs.json": b"{}", "outputs/checkpoints/step_1.pt": b"1",
        "data/manifest.json": b"{}", "train-0123456789ab/jobs/train.py": b"no manifest",
        f"{oldest}/own": b"not in the manifest",
        "train-ba9876543210/manifest.json": stranger,
        "manifest.json": manifests.to_bytes(results),
    }  # fmt: skip
    put(server, url, others)
    server.client().create_multipart_upload(Bucket="bucket", Key=f"{url.split('/', 3)[3]}/outputs/big")
    before = keys(server, url)
    with monkeypatch.context() as patch:
        patch.setattr(upload, "_DAY", 1e12)
        assert re.search(
            r"^keep +unfinished +outputs/big ", launch("upload", "--clean", "--to", url).stdout, re.MULTILINE
        )
    said = launch("upload", "--clean", "--to", url, "--keep", "1", code=2)
    assert "pass --yes to remove 2 snapshots" in said.stderr
    table = {line.split()[2]: line.split()[0] for line in said.stdout.splitlines()}
    assert table == {oldest: "remove", old: "remove", new: "keep", "outputs/big": "remove"}
    said = launch("upload", "--clean", "--to", url, "--keep", "1", answer="no", code=1)
    assert "nothing was removed" in said.stdout
    assert keys(server, url) == before and unfinished(server) != []
    assert "nothing to remove" in launch("upload", "--clean", "--to", f"{url}/outputs/checkpoints").stdout
    assert f"removed {oldest}" in launch("upload", "--clean", "--to", url, "--keep", "2", answer="y").stdout
    assert unfinished(server) == []
    launch("upload", "--clean", "--to", url, "--keep", "1", "--yes")
    assert keys(server, url) == others | {
        name: content for name, content in before.items() if name.startswith(new)
    }


@pytest.mark.parametrize(("words", "said"), [
    (["FOLDER", "--clean"], "--clean uploads nothing: leave out "),
    (["FOLDER", "--keep", "2"], "need --clean"),
    (["FOLDER", "--yes"], "need --clean"),
    ([], "no FOLDER"),
])  # fmt: skip
def test_an_upload_or_a_clean(url, tmp_path, launch, words, said):
    folder = folder_of(tmp_path / "data", {"a": b"1"})
    words = [folder if word == "FOLDER" else word for word in words]
    assert said in launch("upload", *words, "--to", url, code=2).stderr


def test_a_job_s_record_stands_for_its_output(url, tmp_path, launch, monkeypatch):
    launch("upload", folder_of(tmp_path / "out", {"metrics.jsonl": b"{}\n"}), "--to", url)
    record, place = {"id": "17", "endpoint": "https://127.0.0.1", "project_id": "p"}, tmp_path / "records"
    monkeypatch.setattr(job_records, "FOLDER", str(place))
    job_records.write(str(place / "run-1.json"), record | {"outputs": {"train_url": url}})
    job_records.write(str(place / "run-2.json"), record | {"id": "18", "outputs": {"other": url}})
    for number, name in enumerate((place / "run-1.json", "run-1", "17")):
        to = tmp_path / str(number)
        launch("fetch", name, "--to", to)
        assert (to / "metrics.jsonl").read_bytes() == b"{}\n"
    said = launch("fetch", "run-2", "--to", tmp_path / "no", code=2).stderr
    assert re.search(r"run-2: .*no output train_url \(.*other\)", said)
    job_records.write(str(place / "run-3.json"), record | {"id": "19", "outputs": ["train_url"]})
    for name in ("../x", "nosuch", "run-3"):
        said = launch("fetch", name, "--to", tmp_path / "no", code=2).stderr
        assert name in said and "MODELARTS" not in said
