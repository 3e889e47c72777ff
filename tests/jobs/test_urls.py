"""Jobs read their data from an object store and write their results to it."""

import hashlib
import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image

from bootfile.exact import checked_files
from bootfile.exact import files as checkpoint
from bootfile.ground.log_lines import END
from bootfile.histories import read_states, read_weights
from bootfile.receipt import reading, receipt
from common.checkpoint import mirror
from datasets.memory import cifar10
from tests.common.checkpoint.test_mirror import keys, read_list, read_object, steps
from tests.conftest import environment, finish, free_port, interrupt, names, read_until, records, run, start
from tests.jobs.test_resume import figures, same_weights, weights
from tests.support import pictures, tars
from tests.support.fault_proxy import FaultProxy
from tests.support.redis_server import files_with
from tests.support.repeats import repeats

CLASSES = 4
JOB = (
    "jobs/imagenet.py", "--arch=shufflenet_v2_x0_5", "--image_size=32", "--warmup=0", "--print_freq=1",
    "--batch_size=16", "--epochs=3", "--save_every=2", "--data_backend=threads", "--workers=2",
)  # fmt: skip
STEPS = 3 * (CLASSES * 12 // 16)


@pytest.fixture(scope="module")
def images(server, tmp_path_factory):
    """Return a folder of images, which are also at s3://data/images."""
    folder = tmp_path_factory.mktemp("images")
    for split, count in (("train", 12), ("val", 4)):
        for number in range(CLASSES):
            pictures.write(folder / split / f"class{number}", count, (40, 48), "jpg")
    put(server, folder, "images")
    return folder


@pytest.fixture(scope="module")
def plain(images, tmp_path_factory):
    """Return the output of a job that reads the folder and is never interrupted."""
    output = tmp_path_factory.mktemp("plain")
    run(*JOB, "--data_url", images, "--output_dir", output)
    return output


def put(server, folder: Path, prefix: str) -> None:
    client = server.client()
    files = [path for path in folder.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(lambda p: client.upload_file(str(p), "data", f"{prefix}/{p.relative_to(folder)}"), files)
        )


def node(server, scratch: Path, **extra: str) -> dict[str, str]:
    """Return the environment of a job on a node with this scratch disk."""
    scratch.mkdir(parents=True, exist_ok=True)
    return environment(**server.environment, BOOTFILE_SCRATCH=str(scratch), **extra)


def output_of(scratch: Path) -> Path:
    (folder,) = (scratch / f"bootfile-{os.getuid()}" / "outputs").iterdir()
    return folder


def brought(server, url: str, folder: Path) -> Path:
    """Download a URL to a new folder, and return it."""
    prefix = url.partition("://runs/")[2]
    for key in keys(server, url):
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        server.client().download_file("runs", f"{prefix}/{key}", str(path))
    return folder


def same(one: Path, other: Path) -> bool:
    """Compare figures, receipts and weights."""
    reports = [  # a stopped job has saved one state more
        [line for line in figures(output) if "state" not in line] for output in (one, other)
    ]
    receipts = ((output / receipt.FILE).read_bytes() for output in (one, other))
    return reports[0] == reports[1] and len(set(receipts)) == 1 and same_weights(weights(one), weights(other))


@pytest.mark.thorough
def test_a_job_that_is_stopped_resumes_on_another_node(server, images, plain, tmp_path):
    """After SIGTERM and with a new scratch disk, the results are those of an uninterrupted run on folders."""
    url = "s3://runs/moved"
    urls = ("--data_url=s3://data/images", f"--train_url={url}")
    env = node(server, tmp_path / "one")
    stopped = interrupt(*JOB, *urls, at="^epoch=2 step=4/", by=signal.SIGTERM, env=env)
    last = int(re.search(r"stopped .*step (\d+); .*checkpoint .*step \1\n", stopped)[1])
    assert 4 <= last < STEPS and f"all results are at {url}\n" in stopped
    assert steps(server, url)[-1] == last and ".bootfile-lease.json" not in keys(server, url)

    resumed = run(*JOB, *urls, env=node(server, tmp_path / "two")).stdout
    assert re.search(rf"restored step_{last}\.pt .*history .*{url}\n", resumed)
    assert f"step {last} of {STEPS}\n" in resumed and "has no best.pth" not in resumed
    output = brought(server, url, tmp_path / "brought")
    assert same(output, plain)
    assert len(checkpoint.list_newest_first(str(output / "checkpoints"))) == 3 == len(steps(server, url)), (
        "--keep"
    )
    assert len(list(output.glob("events.out.tfevents*"))) == 2
    for folder in (tmp_path, output):
        assert not files_with(server.environment["AWS_SECRET_ACCESS_KEY"], folder)


@pytest.mark.thorough
def test_tar_files_at_a_url_train_as_the_folder_and_resume(server, images, plain, tmp_path):
    tars.from_folder(images, tmp_path / "shards", 2)
    put(server, tmp_path / "shards", "shards")
    job = (*JOB, "--data_url=s3://data/shards/*.tar", f"--output_dir={tmp_path / 'output'}")
    interrupt(*job, at="^epoch=2 step=4/", env=node(server, tmp_path / "scratch"))
    assert len(list((tmp_path / "output" / "index").glob(".files-*.npy"))) == 2  # not among the staged files
    resumed = run(*job, env=node(server, tmp_path / "scratch")).stdout
    assert "staged before: s3://data/shards" in resumed and re.search(
        r"resumed from .* step \d of 9", resumed
    )
    assert same(tmp_path / "output", plain)


def test_results_that_cannot_be_stored_are_exit_code_6(server, images, tmp_path):
    with FaultProxy(server.port, "forbidden", share=1, after=9) as proxy:
        env = node(server, tmp_path, BOOTFILE_STORE_ATTEMPTS="2") | proxy.environment
        arguments = (f"--data_url={images}", "--train_url=s3://runs/shut", "--max_steps=4", "--training_only")
        result = run(*JOB, *arguments, env=env, code=6)
    assert re.fullmatch(
        r"error: not uploaded to s3://runs/shut: s3://runs/shut/\S+: no permission \(AccessDenied\)\n",
        result.stderr,
    )
    assert "warning: not uploaded to s3://runs/shut: " in result.stdout
    end = END.match(result.stdout.splitlines()[-1])
    assert end and names(end["reason"], "not uploaded") and (end["step"], end["code"]) == ("4", "6")
    lines = [line for line in records(output_of(tmp_path)) if "loss" in line]
    assert len(lines) == 4, "the training continued"
    assert "testing-secret" not in result.stdout + result.stderr


# the score of epoch 3 of 4 is the best, so best.pth is replaced twice, and the last epoch does not restore it
TRAIN = (
    "jobs/train.py", "--dataset=digits", "--width=8", "--batch_size=200", "--epochs=4", "--save_every=3",
    "--seed=2", "--lr=1", "--report_every=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the results of a job that is never interrupted (results_of)."""
    output = tmp_path_factory.mktemp("undisturbed")
    run(*TRAIN, "--output_dir", output)
    return results_of(output)


def results_of(output: Path) -> dict[str, object]:
    """Return the bytes of the weights, of the receipt and of the newest checkpoint, and the figures."""
    newest = checkpoint.list_newest_first(str(output / "checkpoints"))[0]
    files = [*output.glob("*.pth"), output / receipt.FILE]
    state = checked_files.read(newest)["objects"]["model"]
    return {path.name: path.read_bytes() for path in files} | {
        "step": Path(newest).name,
        "model": {name: each.tolist() for name, each in state.items()},
        "figures": figures(output),
        "states": [line | {"run": ""} for line in read_states(str(output)).values()],  # its name is random
        "weights": {name: known[-1] for name, known in read_weights(str(output)).items()},
    }


class Gate(FaultProxy):
    """A proxy that blocks the uploads whose path has a pattern, from the given number of them on."""

    def __init__(self, target: int, pattern: str, times: int):
        super().__init__(target)
        self.pattern, self.times, self.seen = pattern, times, 0

    def plan(self, line: str):
        if line.startswith("PUT") and re.search(self.pattern, line):
            self.seen += 1
            if self.seen >= self.times:
                self.closed.wait()
        return super().plan(line)


def run_with_kills(server, url: str, folder: Path, gates: list[tuple[str, int]]) -> dict[str, object]:
    """Run TRAIN. Kill it at each gate (file whose upload is blocked, number of the upload) and start it again
    on a new node. Return the results at the URL."""
    for node_number, (name, times) in enumerate(gates):
        with Gate(server.port, name, times) as gate:
            env = node(server, folder / str(node_number)) | gate.environment
            job = start(*TRAIN, f"--train_url={url}", env=env)
            while gate.seen < times and job.poll() is None:
                time.sleep(0.01)
            job.kill()
            finish(job, None)
        server.client().delete_object(Bucket="runs", Key=f"{url.partition('://runs/')[2]}/{mirror.KEY}")
    run(*TRAIN, f"--train_url={url}", env=node(server, folder / "last"))
    listed = {each["path"]: each["sha256"] for each in read_list(server, url)["files"]}
    for key in keys(server, url):  # every object is in the list; events of killed jobs may be missing there
        if not key.startswith((".bootfile-", "events.")) or key in listed:
            assert hashlib.sha256(read_object(server, url, key)).hexdigest() == listed.pop(key)
    assert not listed
    return results_of(brought(server, url, folder / "brought"))


@pytest.mark.thorough
def test_new_nodes_after_kills_during_uploads(server, undisturbed, tmp_path):
    """A node is killed while it uploads a file of each kind, and another node continues."""
    gates = [
        ("/best.pth", 2), (r"/step_\d+\.pt\.json", 2), ("/epoch_2.pth", 1),
        (".bootfile-outputs.json", 5),
    ]  # fmt: skip
    assert run_with_kills(server, "s3://runs/kills", tmp_path, gates) == undisturbed


@pytest.mark.thorough
def test_new_nodes_after_random_kills(server, undisturbed, tmp_path):
    """30 SIGKILLs at random uploads, 3 in each run."""
    draw = random.Random(0)
    names = ("/best.pth", "/epoch_", "/checkpoints/", ".pt.json", ".bootfile-", "/metrics.jsonl", "/p")
    for number in range(repeats(10)):
        gates = [(draw.choice(names), draw.randint(1, 6)) for _ in range(3)]
        url = f"s3://runs/random-{number}"
        assert run_with_kills(server, url, tmp_path / str(number), gates) == undisturbed, gates


@pytest.mark.thorough
def test_two_nodes_two_scratch_disks(server, images, plain, tmp_path):
    """One process of each node stages the data, and one node takes longer than --timeout."""
    port = free_port()
    with FaultProxy(server.port, held="/data/images/") as slow:
        jobs = []
        for rank in range(2):
            env = node(server, tmp_path / str(rank), BOOTFILE_STORE_TIMEOUT="300")
            jobs.append(start(
                *JOB, "--data_url=s3://data/images", "--train_url=s3://runs/nodes", "--processes_per_node=2",
                f"--init_method=tcp://127.0.0.1:{port}", f"--rank={rank}", "--world_size=2", "--timeout=60",
                env=env | (slow.environment if rank else {}),
            ))  # fmt: skip
        # node 0 reports it after 30, 60 and 90 s
        line = "^waiting .*1 of 4 processes .*stage s3://data/images"
        first = [each for _ in range(3) for each in read_until(jobs[0], line)]
        slow.released.set()
        outputs = [finish(job).stdout for job in jobs]
    outputs[0] = "".join(first) + outputs[0]
    assert all(output.count(f"{CLASSES * 16} files, {CLASSES * 16} fetched") == 1 for output in outputs)
    one, other = (Path(brought(server, "s3://runs/nodes", tmp_path / "brought")), plain)
    assert (one / receipt.FILE).read_bytes() == (other / receipt.FILE).read_bytes()


def test_in_memory_sets_are_staged_too(server, tmp_path, monkeypatch):
    """They are staged: here CIFAR-10 as class folders."""
    for name, value in (server.environment | {"BOOTFILE_SCRATCH": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    for split in ("train", "test"):
        for number in range(10):
            pictures.write(tmp_path / "cifar" / split / f"c{number}", 1, (32, 32), "png")
    put(server, tmp_path / "cifar", "cifar")
    for far, near in zip(
        cifar10.load("s3://data/cifar", False), cifar10.load(str(tmp_path / "cifar"), False), strict=True
    ):
        assert torch.equal(far.images, near.images) and torch.equal(far.labels, near.labels)


@pytest.mark.thorough
def test_pairs_are_staged_and_a_job_without_checkpoints_brings_its_results(server, tmp_path):
    pairs = tmp_path / "pairs"
    for side in ("blurry", "sharp"):
        pictures.write(pairs / "train" / side, 3, (32, 32), "png")
    put(server, pairs, "pairs")
    urls, env = (
        ("--data_url=s3://data/pairs", "--train_url=s3://runs/pairs"),
        node(server, tmp_path / "scratch"),
    )
    printed = run("jobs/loader.py", "--batch_size=3", "--crop=16", *urls, env=env).stdout
    assert "6 files, 6 fetched" in printed and "data train=3 pairs" in printed
    output = brought(server, "s3://runs/pairs", tmp_path / "brought")
    assert len(reading.read_records(str(output))) == len(records(output)) == 1
    assert Image.open(output / "preview.png").size[0] > 16
    assert ".bootfile-lease.json" not in keys(server, "s3://runs/pairs")
