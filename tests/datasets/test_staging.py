"""Staging downloads the objects below a URL once, completely, and no others. The server is real."""

import os
import re
import signal
from pathlib import Path

import pytest

from bootfile.ground.errors import BadInput
from common.ground.shared_folders import locked
from common.object_store.location import SCRATCH, scratch_folder
from datasets import staging
from tests.conftest import LONGEST, environment, finish, free_port, names, start, wait_until
from tests.support.fault_proxy import FaultProxy
from tests.support.hostile_store import HostileStore, listing

# as above, in a process group of two; logs what it waits for
STAGE_TOGETHER = """
import datetime, sys, time, torch
from bootfile.ground import heartbeat
from common.distributed import barrier
from common.distributed.entry import entry
from datasets import staging
heartbeat.EVERY = 0.5
rank, port, url = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = torch.distributed.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
barrier.wait_for_all("begin", "to begin")
store.set_timeout(datetime.timedelta(seconds=float(sys.argv[4])))  # from now on: a start may take longer
@entry
def main():
    print("at", staging.stage(url), flush=True)
main()
store.add("left", 1)
while rank == 0 and store.add("left", 0) < 2:  # the store is in this process
    time.sleep(0.1)
"""


@pytest.fixture
def here(server, monkeypatch, tmp_path):
    """Set the server and a scratch folder. Return a function that stages a URL as a new job does."""
    for name, value in (server.environment | {SCRATCH: str(tmp_path / "scratch")}).items():
        monkeypatch.setenv(name, value)

    def stage(url: str) -> Path:
        staging.stage.cache_clear()
        staging._locks.close()
        return Path(staging.stage(url))

    return stage


def put(server, prefix: str, **files: bytes) -> dict[str, bytes]:
    """Store files, and return name -> content. In the arguments, "__" stands for a slash."""
    files = {name.replace("__", "/"): content for name, content in files.items()}
    for name, content in files.items():
        server.client().put_object(Bucket="data", Key=f"{prefix}/{name}", Body=content)
    return files


def found(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def many(server, prefix: str, count: int = 60) -> dict[str, bytes]:
    return put(server, prefix, **{f"train__c{n % 3}__{n:03}": bytes([n]) * 1000 for n in range(count)})


def test_all_files_arrive_and_are_used_again(server, here, capsys):
    files = put(
        server, "again", train__a__1=b"one", train__b__2=b"two" * 999, empty=b"", x=os.urandom(9_000_000)
    )
    server.client().put_object(Bucket="data", Key="again/train/", Body=b"")  # a folder of a console
    server.client().put_object(Bucket="data", Key="again-not/3", Body=b"not below it")
    folder = here("s3://data/again")
    assert found(folder) == files
    assert "4 files, 4 fetched" in capsys.readouterr().out
    times = {path: os.stat(folder / path).st_mtime_ns for path in files}
    assert here("s3://data/again/") == folder
    assert "4 files unchanged" in capsys.readouterr().out
    assert {path: os.stat(folder / path).st_mtime_ns for path in files} == times
    assert os.stat(folder.parent).st_mode & 0o077 == 0


def test_what_changed_is_fetched_and_what_is_gone_goes(server, here, capsys):
    files = put(server, "change", a=b"1", b__c=b"2", b__d=b"3", e=b"4")
    folder = here("s3://data/change")
    capsys.readouterr()
    for key in ("change/b/c", "change/b/d", "change/e"):
        server.client().delete_object(Bucket="data", Key=key)
    files = {"a": b"1"} | put(server, "change", b=b"a file now", e__f=b"a folder now")
    assert found(here("s3://data/change")) == files
    assert "3 files, 2 fetched" in capsys.readouterr().out
    files |= put(server, "change", a=b"9")  # the same size
    before = os.stat(folder / "a").st_mtime_ns
    assert found(here("s3://data/change")) == files
    assert os.stat(folder / "a").st_mtime_ns != before, "an index accepts it as the file that it has read"
    (folder / "a").write_bytes(b"0")  # the copy is damaged
    (folder / "stranger").write_bytes(b"")
    assert found(here("s3://data/change")) == files


def test_a_copy_that_another_job_reads_is_not_changed(server, here, monkeypatch):
    url, files = "s3://data/shared", put(server, "shared", a=b"1")
    folder = here(url)
    with locked(str(folder.parent / ".lock"), shared=True):
        assert found(here(url)) == files
        staging._locks.close()
        put(server, "shared", a=b"2")
        monkeypatch.setattr(staging, "_IN_USE", 0.3)
        with pytest.raises(BadInput, match=r"another job .*previous copy"):
            here(url)
        assert found(folder) == files
    assert found(here(url)) == {"a": b"2"}


@pytest.mark.parametrize("key", ["../out", "train/x/y"])
def test_hostile_keys_are_refused_by_name(server, here, tmp_path, key):
    prefix = f"hostile{abs(hash(key))}"
    put(server, prefix, train__x=b"1")
    server.client().put_object(Bucket="data", Key=f"{prefix}/{key}", Body=b"2")
    with pytest.raises(BadInput) as refused:
        here(f"s3://data/{prefix}")
    assert ("train/x" if "x" in key else key) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() in (b"1", b"2")]


def test_objects_are_compared_with_their_sha256(server, here, monkeypatch):
    monkeypatch.setenv("BOOTFILE_STORE_ATTEMPTS", "1")
    put(server, "sealed", b=b"fine")
    server.client().put_object(Bucket="data", Key="sealed/a", Body=b"abc", Metadata={"sha256": "0" * 64})
    with pytest.raises(BadInput, match="s3://data/sealed/a: the received bytes"):
        here("s3://data/sealed")
    place = Path(scratch_folder("staged", "s3://data/sealed"))
    assert not list(place.rglob("a"))
    with pytest.raises(BadInput, match="no objects below s3://data/nowhere"):
        here("s3://data/nowhere")


def test_a_full_disk_is_found_before_the_download(here, monkeypatch):
    """The store lists an object of 10^15 bytes, which does not exist."""
    with HostileStore(lambda *_: listing("a", size=10**15)) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store.environment["AWS_ENDPOINT_URL_S3"])
        with pytest.raises(BadInput, match=r"needs 1000000\.000 GB .*, [\d.]+ GB .*free"):
            here("s3://data")


@pytest.mark.thorough
def test_one_process_of_a_node_fetches_and_the_others_wait(server, tmp_path):
    files = many(server, "once", 32)
    port = free_port()
    with FaultProxy(server.port, delay=0.5) as slow:
        env = environment(**server.environment | slow.environment, BOOTFILE_SCRATCH=str(tmp_path))
        jobs = [
            start("-c", STAGE_TOGETHER, rank, port, "s3://data/once", 60, env=env | {"LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]
        outputs = "".join(finish(job).stdout for job in jobs)
        assert slow.requests <= len(files) + 1, "each object once, and one listing"
    assert outputs.count("32 files, 32 fetched") == 1 and outputs.count("at ") == 2
    assert re.search(r"staging s3://data/once: 0\.\d+ of 0\.\d+ GB, .* MB/s \(\d+ s\)", outputs)


def two_nodes(server, tmp_path, proxy, url: str, timeout: float) -> list:
    """Start staging on two nodes, the second one through the proxy."""
    jobs, port = [], free_port()
    for rank, more in enumerate([{}, proxy.environment]):
        (tmp_path / str(rank)).mkdir()
        env = environment(**server.environment | more, BOOTFILE_SCRATCH=str(tmp_path / str(rank)))
        jobs.append(start("-c", STAGE_TOGETHER, rank, port, url, timeout, env=env))
    return jobs


def test_nodes_end_with_the_error_of_one(server, tmp_path):
    """tests/jobs/test_urls.py shows that they wait for the slowest."""
    many(server, "nodes", 32)
    with FaultProxy(server.port, "forbidden", share=1, after=1, delay=0.1) as proxy:
        jobs = two_nodes(server, tmp_path, proxy, "s3://data/nodes", LONGEST)
        errors = [finish(job, 2).stderr for job in jobs]
        assert errors[0] == errors[1] and len(errors[0].splitlines()) == 1
        assert re.search(r"error: s3://data/nodes/train/.*no permission.*\(rank 1 on", errors[0])


@pytest.mark.thorough
def test_a_node_that_is_lost_while_it_stages_does_not_keep_the_others(server, tmp_path):
    many(server, "lost", 40)
    with FaultProxy(server.port, delay=2) as slow:
        jobs = two_nodes(server, tmp_path, slow, "s3://data/lost", 4)
        wait_until(lambda: slow.requests >= 2)
        jobs[1].send_signal(signal.SIGKILL)
        finish(jobs[1], -signal.SIGKILL)
        assert names(finish(jobs[0], 4).stderr, "rank 1", "no heartbeat", "4 s")
