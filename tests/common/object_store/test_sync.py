"""A folder and a URL are compared and made equal. The server is real."""

import hashlib
import os
import threading
import time
import types
from functools import partial

import pytest

from bootfile.ground.errors import BadInput
from common.object_store import sync
from common.object_store.store import Object, ObjectStore, StoreError
from common.object_store.sync import Progress

pytest.importorskip("boto3", reason="boto3 is not installed")
pytest.importorskip("moto", reason="moto is not installed")

FILES = {"a": b"1" * 1000, "sub/b": b"", "sub/deep/c": b"2" * 5000, "big": bytes(9_000_000)}


@pytest.fixture
def store(server, monkeypatch, request):
    """Yield an ObjectStore of three threads, with a prefix for this test."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("BOOTFILE_STORE_ATTEMPTS", "1")
    with ObjectStore(f"s3://bucket/{request.node.name}", threads=3) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "from" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "from"


def describe(name: str) -> Object:
    return Object(name, len(FILES[name]), sha256=hashlib.sha256(FILES[name]).hexdigest())


class Recorded(Progress):
    """Keeps the names of the threads that report."""

    def __init__(self):
        super().__init__()
        self.reporters = set()

    def report(self):
        self.reporters.add(threading.current_thread())


def test_a_folder_comes_back(store, folder, tmp_path):
    size = sum(map(len, FILES.values()))
    sent, came, arrived = Recorded(), Recorded(), []
    sync.send(store, str(folder), map(describe, FILES), sent)
    objects = list(store.list())
    sync.fetch(store, str(tmp_path / "to"), objects, came, after=lambda *facts: arrived.append(facts))
    for name, content in FILES.items():
        assert (tmp_path / "to" / name).read_bytes() == content
    assert sent.count == came.count == size
    assert sent.reporters == came.reporters == {threading.current_thread()}
    assert sorted(arrived) == sorted((entry, True) for entry in objects)


def test_only_what_differs_is_missing(store):
    threads = set()

    def is_equal(entry):
        threads.add(threading.current_thread().name.partition("_")[0])
        return entry.key.startswith("sub")

    missing, unchanged = sync.compare(store, map(describe, FILES), is_equal)
    assert [entry.key for entry in missing] == ["big", "a"], "the largest first"
    assert [entry.key for entry in unchanged] == ["sub/deep/c", "sub/b"]
    assert threads == {"transfer"}


def test_a_file_with_another_digest_is_refused_on_both_ways(store, folder, tmp_path):
    wrong = describe("a")._replace(sha256="0" * 64)
    with pytest.raises(BadInput, match="has changed since its sha256"):
        sync.send(ObjectStore(store.location.url()), str(folder), [wrong], Progress())
    store.write("a", FILES["a"])
    with pytest.raises(StoreError, match="not those that were sent"):
        sync.fetch(store, str(tmp_path / "to"), [wrong], Progress())
    assert os.listdir(tmp_path / "to") == []


def test_the_first_failure_ends_all_tasks(store):
    """The tasks that have not begun are never begun, and the store refuses later requests."""
    begun = []

    def work(number):
        begun.append(number)
        if number == 2:
            raise BadInput("of the second")
        store.client._stopped.wait()
        time.sleep(1)  # meanwhile those that wait are taken back
        return -number

    assert sync.run(store, []) == []
    with pytest.raises(BadInput, match="of the second"):
        sync.run(store, (partial(work, number) for number in range(1000)))
    assert len(begun) < 50
    with pytest.raises(StoreError, match="interrupted"):
        store.head("a")


def test_answers_are_in_the_order_of_the_tasks(store):
    def work(number):
        if number % 3 == 0:
            time.sleep(0.02)
        return number

    assert sync.run(store, (partial(work, number) for number in range(40))) == list(range(40))


def test_links_to_folders_are_entries(folder):
    (folder / "link").symlink_to(folder / "sub")
    (folder / "empty").mkdir()
    paths = {os.path.relpath(entry.path, folder) for entry in sync.list_files(str(folder))}
    assert paths == {*FILES, "link"}
    with pytest.raises(OSError):
        list(sync.list_files(str(folder / "nowhere")))


def test_the_progress_is_reported_after_each_task():
    store = types.SimpleNamespace(threads=1, stop=lambda: None)
    reports = []
    results = sync.run(store, [lambda: 1, lambda: 2], lambda: reports.append(len(reports)))
    assert results == [1, 2] and reports
