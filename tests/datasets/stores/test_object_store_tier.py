"""Images in an object store give the same index, bits and receipts as a folder. The server is real."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from common.exits import BadInput
from datasets.folders import image_folder
from datasets.loaders import backends
from datasets.sampling.augment import random_resized_crop
from datasets.sampling.sampler import BatchSampler, Plan
from datasets.stores import files, object_store, tiers
from tests.support import redis_server
from tests.support.fault_proxy import FaultProxy
from tests.support.object_store_server import ObjectStoreServer

URL = "s3://data/set"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def server():
    with ObjectStoreServer("data") as server:
        yield server


@pytest.fixture(scope="module")
def folder(server, tmp_path_factory):
    """Return a folder with odd sizes, grey, PNG, hidden and other files, and a list for the other split."""
    folder, draw = tmp_path_factory.mktemp("set"), np.random.default_rng(0)
    for name in (
        "a/1.jpg",
        "a/deeper/2.png",
        "b b/3.JPEG",
        "b b/4.jpg",
        "c/5.png",
        "c/6.jpg",
        "c/.hidden.jpg",
    ):
        path = folder / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (40, 30) if name[-5] == "4" else (33, 47, 3)
        Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8)).save(path)
    (folder / "train" / "a" / "notes.txt").write_text("not an image")
    (folder / "val.txt").write_text("train/c/5.png c\ntrain/b b/3.JPEG b b\n".replace("b b\n", "a\n"))
    put(server, folder)
    return folder


def put(server, folder):
    client = server.client()
    paths = [path for path in folder.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda p: client.upload_file(str(p), "data", f"set/{p.relative_to(folder)}"), paths))


@pytest.fixture(autouse=True)
def here(server, monkeypatch):
    for name, value in (server.environment | {"BOOTFILE_STORE_ATTEMPTS": "2"}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def indexes(folder, tmp_path):
    """Return the indexes of the folder and of the URL."""
    return [
        image_folder.load(str(root), "train", str(tmp_path / "cache"), log=lambda line: None, staged=False)
        for root in (folder, URL)
    ]


def receipt_of(store, backend: str) -> tuple[str, torch.Tensor]:
    """Return the receipt of an epoch, and its images."""
    plan = Plan(store.index, BatchSampler(len(store.index), 2, 0), random_resized_crop, 24)
    with backends.build(backend, store, plan, CPU, 2) as loader:
        loader.seek(0)
        images = torch.stack([images.clone() for images, _ in loader])
        taken = loader.receipt.take()
    return taken.tolist(), images


def test_the_index_is_that_of_the_folder(indexes, folder, tmp_path):
    local, far = indexes
    assert far.fingerprint == local.fingerprint and far.classes == ("a", "b b", "c") and len(far) == 6
    assert far.path(0) == f"{URL}/train/a/1.jpg"
    said = []
    again = image_folder.load(f"{URL}/", "train", str(tmp_path / "cache"), log=said.append, staged=False)
    assert again.fingerprint == far.fingerprint
    for split, below, count in (("val", "", 2), ("train", "/train", 5), ("val", "/train", 1)):
        one, other = (
            image_folder.load(
                f"{root}{below}", split, str(tmp_path / "cache"), 0, far.classes, said.append, False, 0.3
            )
            for root in (folder, URL)
        )
        assert one.fingerprint == other.fingerprint and len(one) == len(other) == count


@pytest.mark.parametrize("backend", ["threads", "pytorch"])
def test_every_engine_delivers_the_same(indexes, backend):
    (expected, images), (found, others) = (
        receipt_of(object_store.origin(index, verified=True), backend) for index in indexes
    )
    assert expected == found and torch.equal(images, others)


def test_a_batch_is_asked_for_at_once_and_survives_a_pickle(server, indexes, monkeypatch):
    with FaultProxy(server.port, delay=0.2) as slow:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", slow.environment["AWS_ENDPOINT_URL_S3"])
        store = object_store.origin(indexes[1])
        for each in (store, pickle.loads(pickle.dumps(store))):
            before = slow.requests
            found = each.read(np.arange(6))
            assert slow.requests == before + 6
            for id, content in enumerate(found):
                assert content == files.FileStore(indexes[0]).content(id)
                assert np.array_equal(each.decode(id, content), files.FileStore(indexes[0]).image(id))
            assert slow.requests == before + 6
            each.close()


def test_a_pack_and_a_shared_cache_are_filled_from_it(indexes, tmp_path):
    opened = tiers.Stores(str(tmp_path / "packs"), None, "active", False)
    local, far = indexes
    store = opened.open(far)
    assert store.form == "decoded"
    assert np.array_equal(store.image(1), files.FileStore(local).image(1))
    opened.close()
    if redis_server.PROGRAM is None:
        pytest.skip("redis-server is not installed: make packages installs it")
    with redis_server.RedisServer(tmp_path) as cache:
        opened = tiers.Stores(None, cache.url(), "active", False)
        store = opened.open(far)
        expected = receipt_of(files.FileStore(local), "threads")[0]
        for _ in range(2):
            assert receipt_of(store, "threads")[0] == expected
            redis_server.until(lambda: store.cache.counts["put"] == len(far))
        assert store.cache.counts["hits"] >= len(far)
        opened.close()


def test_what_changed_or_went_away_is_named(server, indexes, folder, tmp_path):
    client, store = server.client(), object_store.origin(indexes[1])
    good = (folder / "train" / "a" / "1.jpg").read_bytes()
    for content in (good[:-1] + b"\0", good[:-1], None):
        if content is None:
            client.delete_object(Bucket="data", Key="set/train/a/1.jpg")
        else:
            client.put_object(Bucket="data", Key="set/train/a/1.jpg", Body=content)
        assert len(store.read(np.array([1]))) == 1
        for read in (lambda: store.read(np.array([0, 1])), lambda: store.image(0)):
            with pytest.raises(BadInput, match=r"s3://data/set/train/a/1\.jpg"):
                read()
    put(server, folder)


def test_a_store_that_is_away_is_not_asked_for_every_image(server, folder, tmp_path, monkeypatch):
    with FaultProxy(server.port, "forbidden", share=1, after=1) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.environment["AWS_ENDPOINT_URL_S3"])
        with pytest.raises(
            BadInput, match=r"6 of 6 files in s3://data/set/train cannot be read: .*no permission"
        ):
            image_folder.load(URL, "train", str(tmp_path), log=lambda line: None, staged=False)
