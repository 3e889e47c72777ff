"""Engines get the same data from every tier, form and world size, whatever fails."""

import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from bootfile.ground.errors import BadInput
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler
from datasets.folders import image_folder
from datasets.loaders import backends
from datasets.sampling.augment import random_resized_crop
from datasets.stores import connection, forms, pack, tiers
from datasets.stores.files import FileStore
from datasets.stores.tiers import Stores
from tests.support import pictures
from tests.support.receipts import sums_of
from tests.support.redis_server import Opened, RedisServer, needed, until

pytest.importorskip("redis", reason="redis-py is not installed")

CPU = torch.device("cpu")
MISSING = backends.reasons(CPU)["dali"]
BACKENDS = [
    "kspeed", "pytorch",
    pytest.param("dali-kspeed", marks=pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}")),
]  # fmt: skip


@pytest.fixture(scope="module")
def uncached(index, tmp_path_factory):
    """Return form -> a store without a cache that gives the same bits."""
    path = str(tmp_path_factory.mktemp("packs") / "decoded")
    return {"encoded": FileStore(index), "decoded": pack.build(index, path)}


def plan_of(index, rank=0, world_size=1) -> Plan:
    return Plan(
        index, BatchSampler(len(index), 8, 7, rank=rank, world_size=world_size), random_resized_crop, 64
    )


def epoch_of(loader, epoch=1, at_step=lambda step: None):
    """Return the batches and the receipt's sums."""
    loader.seek((epoch - 1) * len(loader))
    batches = []
    for step, (images, labels) in enumerate(loader):
        batches.append((images.clone(), labels.clone()))
        at_step(step)
    return batches, torch.from_numpy(loader.receipt.take())


def equal(some, others) -> bool:
    return len(some) == len(others) and all(
        torch.equal(a, b) and torch.equal(c, d) for (a, c), (b, d) in zip(some, others, strict=True)
    )


def planned(index, epoch=1) -> torch.Tensor:
    return sums_of(plan_of(index), epoch)


@needed
@pytest.mark.parametrize("form", forms.SIZED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_bits_with_and_without_a_cache(backend, form, empty_redis, index, uncached, monkeypatch):
    """This holds in the epoch that fills the cache and in the epoch that reads it. Nothing is left behind."""
    monkeypatch.setattr("datasets.stores.redis_store._BEAT", 0.1)
    with backends.build(backend, uncached[form], plan_of(index), CPU, 2) as loader:
        expected, _ = epoch_of(loader)
    threads = threading.active_count()
    with (
        Opened(empty_redis.url(tail=f"?form={form}"), index, "active") as opened,
        backends.build(backend, opened.tiers, plan_of(index), CPU, 2) as loader,
    ):
        cold, sums = epoch_of(loader)
        assert equal(cold, expected) and torch.equal(sums, planned(index))
        until(lambda: (opened.tiers.cache.lengths(range(len(index))) > 0).all())
        warm, sums = epoch_of(loader)
        assert equal(warm, expected) and torch.equal(sums, planned(index))
        assert opened.said == []
    assert empty_redis.client().dbsize() == 0
    assert threading.active_count() <= threads
    until(lambda: len(empty_redis.client().client_list()) == 1)


@needed
def test_processes_share_what_they_read(empty_redis, index):
    """Each rank reads the samples that the others have stored."""
    before = empty_redis.client().info("stats")["keyspace_hits"]
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(Opened(empty_redis.url(), index, "active")).tiers for _ in range(4)]
        for epoch in (1, 2):
            total = torch.zeros_like(planned(index))
            for rank, tiers in enumerate(ranks):
                with backends.build("kspeed", tiers, plan_of(index, rank, 4), CPU, 1) as loader:
                    total += epoch_of(loader, epoch)[1]
            assert torch.equal(total, planned(index, epoch))
            until(lambda: (ranks[0].cache.lengths(range(len(index))) > 0).all())
        assert empty_redis.client().info("stats")["keyspace_hits"] >= before + len(index)
    assert empty_redis.client().dbsize() == 0


@needed
@pytest.mark.parametrize("fault, backend", [
    *(("kill", backend) for backend in ("pytorch", "dali-kspeed")[:1 if MISSING else 2]),
    ("pause", "kspeed"), ("flip", "kspeed"),
])  # fmt: skip
def test_whatever_fails_in_the_middle(fault, backend, tmp_path, index, uncached, monkeypatch):
    if fault == "pause":
        monkeypatch.setattr(connection, "READ", 0.3)
    monkeypatch.setattr("datasets.stores.redis_store._BEAT", 0.1)
    with backends.build(backend, uncached["decoded"], plan_of(index), CPU, 2) as loader:
        expected = [epoch_of(loader, epoch)[0] for epoch in (1, 2)]

    def strike(step):
        if step == 1 and fault == "kill":
            server.kill()
        elif step == 1 and fault == "pause":
            server.pause()
        elif step == 1 and fault == "flip":
            for key in server.client().scan_iter("*:decoded256:[0-9]*"):
                server.client().setrange(key, 1000, b"\0\1\2\3")

    with RedisServer(tmp_path) as server, Opened(server.url(), index, "active") as opened:
        tiers, said = opened.tiers, opened.said
        ids = list(range(len(index)))
        tiers.cache.put(ids, [forms.make(tiers.files, id, "decoded") for id in ids])
        with backends.build(backend, tiers, plan_of(index), CPU, 2) as loader:
            for epoch in (1, 2):
                batches, sums = epoch_of(loader, epoch, strike if epoch == 1 else lambda step: None)
                assert equal(batches, expected[epoch - 1]) and torch.equal(sums, planned(index, epoch))
            if fault != "flip":
                until(lambda: said)  # logged by the thread that checks, while others fetch
                # on a busy machine a server may be silent for 0.3 s before it is paused
                again = [line.endswith(": it answers again") for line in said]
                assert again == [False, True] * (len(said) // 2) + [False], said


@needed
def test_an_image_that_went_bad_is_named_only_where_it_is_read(empty_redis, tmp_path):
    folder = pictures.make(tmp_path / "images", 8, 1)
    index = image_folder.load(str(folder), "train", str(tmp_path / "cache"))
    with Opened(empty_redis.url(), index, "active") as opened:
        tiers = opened.tiers
        tiers.cache.put(range(8), [forms.make(tiers.files, id, "decoded") for id in range(8)])
        os.truncate(index.path(3), 100)
        with backends.build("kspeed", tiers, plan_of(index), CPU, 2) as loader:
            assert len(epoch_of(loader)[0]) == 1
            empty_redis.client().flushall()
            with pytest.raises(BadInput, match=rf"{index.path(3)} has 100 bytes"):
                epoch_of(loader)


@needed
def test_a_set_that_is_not_stored_is_named(empty_redis, index):
    for mode in ("offline", "active"):
        said = []
        stores = Stores(None, empty_redis.url(), mode, said.append)
        stores.open(index)
        stores.close()
        assert [f"{index.fingerprint}:decoded256" in line for line in said] == [True] * (mode == "offline")
    with Opened(empty_redis.url(), index) as opened:
        assert opened.sets() == []


@needed
def test_the_end_of_a_job_releases_its_sets(empty_redis, index):
    client = empty_redis.client()
    stores = Stores(None, empty_redis.url(), "active")
    assert stores.open(index) is stores.open(index)
    until(lambda: client.dbsize() > 0)
    stores.close()
    assert client.dbsize() == 0


@needed
def test_a_file_that_changed_after_the_scan_is_not_cached(empty_redis, tmp_path):
    """With the same size and times, this job reads the file as without a cache, and does not store it."""
    folder = pictures.make(tmp_path / "images", 8, 1)
    index = image_folder.load(str(folder), "train", str(tmp_path / "cache"))
    content = bytearray(Path(index.path(3)).read_bytes())
    content[-200] ^= 1
    Path(index.path(3)).write_bytes(content)
    os.utime(index.path(3), ns=(0, int(index.mtimes[3])))
    pictures.take_ctimes(index)
    with Opened(empty_redis.url(tail="?form=encoded"), index, "active") as opened:
        tiers = opened.tiers
        with backends.build("kspeed", tiers, plan_of(index), CPU, 2) as loader:
            epoch_of(loader)
        until(lambda: (tiers.cache.lengths(range(8)) > 0).sum() == 7)
        assert tiers.cache.lengths([3]).tolist() == [0]
        assert tiers.read([3]) == [bytes(content)]


def test_threads_read_the_files_of_misses_if_a_file_takes_long(index, monkeypatch):
    files, readers = FileStore(index), []
    read = files.content

    def content(id):
        readers.append(threading.current_thread().name)
        time.sleep(0.01)
        return read(id)

    monkeypatch.setattr(files, "content", content)
    ids = [3, 0, 5, 2]
    assert tiers.Tiers(Misses(), files).read(np.array(ids)) == [read(id) for id in ids]
    assert readers[0] == "MainThread" and not {"MainThread"} & set(readers[1:])


class Misses:
    """A cache that has no sample and wants none."""

    form = "encoded"

    def read(self, ids):
        return [None] * len(ids)

    def wants_samples(self):
        return False
