"""A network mount that does not answer for a moment: files are read again, else a restart is asked for."""

import json

import numpy as np
import pytest
import torch

from bootfile.exact import files as checkpoints
from bootfile.exact.choose import choose
from bootfile.ground import again, errors
from bootfile.ground.errors import NOT_SAVED, BadInput, Unavailable
from bootfile.loaders.map_style import map_style_loader
from bootfile.receipt import receipt
from bootfile.sampling.sampler import BatchSampler
from common.checkpoint import weights
from datasets import shards
from datasets.folders import image_folder
from datasets.loaders.image_folders import _read_weights
from datasets.memory import tokens
from datasets.stores import pack
from datasets.stores.files import FileStore
from tests.conftest import run
from tests.support import pictures, tars
from tests.support.failing_files import count, failing

KINDS = ("ESTALE", "EIO", "EAGAIN", "ETIMEDOUT", "ENOTCONN", "EREMOTEIO", "EHOSTDOWN", "ECONNRESET")
LATER = "start it again when"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Do not wait between two attempts, and print the line of each test."""
    monkeypatch.setattr(again, "PAUSES", (0, 0, 0))
    monkeypatch.setattr(again, "_lost_since", None)
    monkeypatch.setattr(again, "_warn_once", errors.Once(errors.print_line))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder with images, tar files, tokens, weights and checkpoints."""
    root = tmp_path_factory.mktemp("data")
    pictures.make(root / "images", 8, 4)
    paths = sorted((root / "images/train").rglob("*.jpg"))
    tars.write(root / "one.tar", [(f"{path.parent.name}/{path.name}", path.read_bytes()) for path in paths])
    pictures.make(root / "list", 8, 4)
    names = [path.relative_to(root / "images") for path in paths]
    (root / "list/train.txt").write_text("".join(f"{name} {name.parent.name}\n" for name in names))
    (root / "tokens").mkdir()
    for name in tokens._BINS:
        np.arange(400, dtype=np.uint16).tofile(root / "tokens" / name)
    (root / "weights.txt").write_text("a 1\nb 2\n")
    torch.save({"weight": torch.ones(2)}, root / "model.pth")
    checkpoints.write(str(root / "step_1.pt"), {"step": 1})
    return root


class Items(torch.utils.data.Dataset):
    """Items that are read from a file, with random numbers."""

    def __init__(self, path):
        self.path = str(path)

    def __len__(self):
        return 4

    def __getitem__(self, id):
        noise = torch.rand(1)
        with open(self.path, "rb") as file:
            return torch.tensor([file.read()[0] + id], dtype=torch.float32) + noise, id


def scan(data, cache, root="images"):
    return image_folder.load(str(data / root), "train", str(cache), log=str)


def scan_tars(data, cache):
    return image_folder.load(str(data / "*.tar"), "train", str(cache), log=str, val_share=0.0)


def read_all(store):
    return b"".join(store.read(np.arange(len(store.index))))


def read_items(data):
    sampler = BatchSampler(4, 2, seed=0, epochs=1)
    loader = map_style_loader(Items(data / "weights.txt"), sampler, torch.device("cpu"))
    return [inputs.tolist() for _ in loader.epochs_from(0) for inputs, _ in loader]


def choose_checkpoint(data):
    return choose(str(data), str(data), lambda state: None)[1]["step"]


# what reads -> (function of (data, cache), part of the paths of the calls that fail)
READERS = {
    "a scan": (lambda data, cache: scan(data, cache).fingerprint, r"/train/.*\.jpg$"),
    "a list of folders": (lambda data, cache: scan(data, cache).fingerprint, "/train/class_1$"),
    "the root folder": (lambda data, cache: scan(data, cache).fingerprint, "/images$"),
    "a list": (lambda data, cache: scan(data, cache, "list").fingerprint, "/train.txt$"),
    "an image": (lambda data, cache: read_all(FileStore(scan(data, cache))), r"/train/.*\.jpg$"),
    "a tar file": (lambda data, cache: scan_tars(data, cache).fingerprint, "/one.tar$"),
    "a member of a tar file": (lambda data, cache: read_all(FileStore(scan_tars(data, cache))), "/one.tar$"),
    "a shard": (lambda data, cache: len(shards.TarShards(str(data / "one.tar"))[0]), "/one.tar$"),
    "an index": (lambda data, cache: scan(data, cache).fingerprint, "/index.json$"),
    "tokens": (lambda data, cache: tokens.load(str(data / "tokens"), 8)[0].source, r"/train\.bin$"),
    "weights of samples": (lambda data, cache: _read_weights(str(data / "weights.txt")), "/weights.txt$"),
    "weights": (lambda data, cache: weights.read(str(data / "model.pth")), "/model.pth$"),
    "a checkpoint": (lambda data, cache: choose_checkpoint(data), "/step_1.pt$"),
    "its checksum": (lambda data, cache: choose_checkpoint(data), "/step_1.pt.json$"),
    "a data set of the user": (lambda data, cache: read_items(data), "/weights.txt$"),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_fails_once_is_read_again(reader, data, tmp_path, capsys):
    read, pattern = READERS[reader]
    cache = tmp_path / "cache"
    expected = repr(read(data, cache))
    if reader in ("a scan", "a tar file"):
        cache = tmp_path / "other"
    with failing(tmp_path / "faults", pattern):
        assert repr(read(data, cache)) == expected
    assert count(tmp_path / "faults") == 1
    assert capsys.readouterr().out.count("it is read again") == 1


@pytest.mark.parametrize("reader", READERS)
def test_what_fails_for_longer_asks_for_a_restart(reader, data, tmp_path):
    read, pattern = READERS[reader]
    read(data, tmp_path / "cache")
    cache = tmp_path / ("other" if reader in ("a scan", "a tar file") else "cache")
    with failing(tmp_path / "faults", pattern, "EIO", times=10**6), pytest.raises(Unavailable, match=LATER):
        read(data, cache)
    assert Unavailable.code == NOT_SAVED


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_a_mount_that_does_not_answer(kind, data, tmp_path):
    store = FileStore(scan(data, tmp_path / "cache"))
    with failing(tmp_path / "faults", r"\.jpg$", kind, times=3):
        read_all(store)
    assert count(tmp_path / "faults") == 3


def test_a_file_that_is_missing_is_not_read_again(data, tmp_path):
    store = FileStore(scan(data, tmp_path / "cache"))
    for kind in ("ENOENT", "EACCES", "ELOOP"):
        with failing(tmp_path / kind, r"\.jpg$", kind), pytest.raises(BadInput) as refused:
            read_all(store)
        assert refused.value.code == errors.BAD_INPUT and count(tmp_path / kind) == 1


def test_a_mount_that_is_gone_is_waited_for_once_and_not_for_each_file(data, tmp_path):
    with failing(tmp_path / "faults", r"/train/.*\.jpg$", "EIO", times=10**6), pytest.raises(Unavailable):
        scan(data, tmp_path / "cache")
    assert len(again.PAUSES) < count(tmp_path / "faults") <= 1 + len(again.PAUSES) + 7 * 2
    with failing(tmp_path / "once", r"/train/.*\.jpg$", "EIO"):
        scan(data, tmp_path / "cache")
    assert again._lost_since is None


def test_a_pack_that_cannot_be_read_for_a_moment_is_not_built_again(data, tmp_path):
    index = scan(data, tmp_path / "cache")
    path = str(tmp_path / "one.pack")
    pack.build(index, path)
    states = {name.name: name.stat().st_mtime_ns for name in (tmp_path / "one.pack").iterdir()}
    for pattern in (r"/meta\.json$", r"/000000\.arrow$"):
        with failing(tmp_path / "once", pattern):
            assert pack.is_whole(index, path, "decoded")
        with failing(tmp_path / "often", pattern, times=10**6), pytest.raises(Unavailable, match=LATER):
            pack.build(index, path)
    assert states == {name.name: name.stat().st_mtime_ns for name in (tmp_path / "one.pack").iterdir()}


JOB = ("jobs/imagenet.py", "--arch=shufflenet_v2_x0_5", "--image_size=32", "--warmup=0", "--batch_size=8")
JOB += ("--lr=0.01", "--epochs=1", "--workers=2", "--training_only")


def job(tmp_path, name, backend, **faults):
    words = [*JOB, f"--data_url={tmp_path / 'images'}", f"--cache_dir={tmp_path / 'index'}"]
    words += [f"--output_dir={tmp_path / name}", f"--data_backend={backend}"]
    if not faults:
        return words
    folder = tmp_path / f"faults of {name}"
    folder.mkdir()
    (folder / "faults.json").write_text(json.dumps({"pattern": r"/train/.*\.jpg$", "calls": "open"} | faults))
    return ["-m", "tests.support.failing_files", folder, *words]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["threads", "pytorch"])
def test_a_job_reads_again_or_saves_and_a_restart_continues_exactly(backend, tmp_path):
    pictures.make(tmp_path / "images", 80, 8)
    run(*job(tmp_path, "whole", backend))
    expected = (tmp_path / "whole" / receipt.FILE).read_bytes()

    once = run(*job(tmp_path, "once", backend, after=20))
    assert "it is read again" in once.stdout
    assert (tmp_path / "once" / receipt.FILE).read_bytes() == expected

    ended = run(*job(tmp_path, "ended", backend, after=50, times=10**6, error="EIO"), code=NOT_SAVED)
    assert "saved at step" in ended.stdout
    assert LATER in ended.stderr and ended.stderr.startswith("error: cannot read ")
    again = run(*job(tmp_path, "ended", backend))
    assert "resumed from" in again.stdout
    assert (tmp_path / "ended" / receipt.FILE).read_bytes() == expected


@pytest.mark.thorough
def test_an_index_of_a_mount_that_does_not_answer_asks_for_a_restart(tmp_path):
    pictures.make(tmp_path / "images", 24, 8)
    words = job(tmp_path, "out", "threads", times=10**6, error="EIO")
    ended = run(*words, code=NOT_SAVED)
    assert "24 of 24 files" in ended.stderr and LATER in ended.stderr
    assert "it is read again" in ended.stdout
