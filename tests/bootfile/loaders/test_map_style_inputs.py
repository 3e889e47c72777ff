"""What a Dataset of your own may hold and return: open files, unseeded numbers, items of several types."""

import concurrent.futures
import functools
import os
import socket
import sqlite3
import tempfile
import time
import zipfile
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from bootfile import torch_loader
from bootfile.ground.errors import BadInput
from bootfile.loaders.map_style import map_style_loader
from bootfile.sampling.sampler import BatchSampler

CPU = torch.device("cpu")
SIZE, ITEM = 200, 16384  # an item is larger than the buffer of a file


class Items(Dataset):
    """A data set of what a function returns for a number."""

    def __init__(self, item, size=SIZE, **held):
        self.item, self.size, self.held = item, size, held

    def __len__(self):
        return self.size

    def __getitem__(self, id):
        return self.item(self, id)


def loader(dataset, workers=0, batch=8, **options):
    return map_style_loader(dataset, BatchSampler(len(dataset), batch, 0, 1), CPU, workers=workers, **options)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "items.bin"
    path.write_bytes(b"".join(np.full(ITEM // 4, id, np.int32).tobytes() for id in range(SIZE)))
    with zipfile.ZipFile(tmp_path / "items.zip", "w") as archive:
        for id in range(SIZE):
            archive.writestr(str(id), np.full(ITEM // 4, id, np.int32).tobytes())
    return path


def _seek(data, id):
    data.held["file"].seek(id * ITEM)
    time.sleep(1e-3)  # another worker moves the position, if it is shared
    return torch.from_numpy(np.fromfile(data.held["file"], np.int32, ITEM // 4)), id


def _seek_later(data, id):
    if "file" not in data.held:
        data.held["file"] = data.held["path"].open("rb", buffering=0)
    return _seek(data, id)


def _unzip(data, id):
    return torch.from_numpy(np.frombuffer(data.held["file"].read(str(id)), np.int32).copy()), id


def _raw(data, id):
    os.lseek(data.held["number"], id * ITEM, os.SEEK_SET)
    time.sleep(1e-3)
    return torch.from_numpy(np.frombuffer(os.read(data.held["number"], ITEM), np.int32).copy()), id


def _nameless(path):
    file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(path.read_bytes())
    file.flush()
    return Items(_seek, file=file)


OPENED = {
    "constructor": lambda path: Items(_seek, file=path.open("rb")),
    "unbuffered": lambda path: Items(_seek, file=path.open("rb", buffering=0)),
    "append": lambda path: Items(_seek, file=path.open("a+b")),
    "nameless": _nameless,
    "later": lambda path: Items(_seek_later, path=path),
    "zip": lambda path: Items(_unzip, file=zipfile.ZipFile(path.with_suffix(".zip"))),
    "raw": lambda path: Items(_raw, number=os.open(path, os.O_RDONLY)),
}


@pytest.mark.parametrize("kind", OPENED)
def test_each_worker_reads_the_bytes_of_its_own_samples_from_a_file_that_is_open(path, kind):
    with loader(Subset(OPENED[kind](path), range(SIZE)), workers=2) as batches:
        wrong = [ids[(inputs != ids[:, None]).any(1)].tolist() for inputs, ids in batches]
    assert not any(wrong), wrong


def test_a_file_that_cannot_be_opened_again_ends_the_job_with_its_name(path, monkeypatch):
    dataset = Items(_seek, file=path.open("rb"))
    open_file = os.open

    def refuse(name, *args, **options):
        if str(name).startswith("/proc/self/fd/") and os.readlink(name) == str(path):
            raise PermissionError(13, "Permission denied")
        return open_file(name, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(BadInput, match=r"items\.bin .*Permission denied.*--workers 0"):
        loader(dataset, workers=1)


def test_a_connection_that_workers_would_share_is_named(tmp_path):
    database = sqlite3.connect(tmp_path / "x.db")
    database.execute("create table items(id)")
    ends = [socket.create_server(("127.0.0.1", 0))]
    ends.append(socket.create_connection(ends[0].getsockname()))
    pipe = os.fdopen(os.pipe()[0], "rb")
    memory = sqlite3.connect(":memory:")
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(int).result()
    session = SimpleNamespace(adapters={"http://": SimpleNamespace(manager=Pools(ends[1]))})  # as in requests
    opened = functools.cache(lambda: database)
    opened()

    def item(data, id, default=pipe):
        return torch.zeros(1), id

    for held, name in (
        ({"a": [database]}, r"held\.a\.0 .*Connection"),
        ({"a": ends[1]}, r"held\.a .*socket"),
        ({"a": socket.socketpair()}, r"held\.a\..*socket"),
        ({"a": pool}, r"held\.a .*ThreadPoolExecutor"),
        ({"a": session}, r"held\.a\..*sock .*socket"),
        ({"a": functools.cache(lambda: None), "b": opened}, r"held\.b\..*Connection"),
    ):
        with pytest.raises(BadInput, match=rf"dataset\.dataset\.{name}.*__getitem__.*--workers 0"):
            loader(Subset(Items(lambda data, id: (torch.zeros(1), id), **held), range(9)), workers=1, batch=3)
    with pytest.raises(BadInput, match=r"open _io\.BufferedReader"):
        loader(Items(item), workers=1)
    for held, workers in (({"a": database}, 0), ({"a": memory, "b": ends[0]}, 1)):
        with loader(Items(lambda data, id: (torch.zeros(1), id), **held), workers) as batches:
            assert len(list(batches)) == len(batches)


class Pools:
    """A pool of connections, as deep as that of requests."""

    def __init__(self, sock):
        queue = SimpleNamespace(queue=[None, SimpleNamespace(sock=sock)])
        self.pools = SimpleNamespace(_container={("http", 80): SimpleNamespace(pool=queue)})


def _keep(data, id):
    if id not in data.held:
        data.held[id] = torch.rand(1), id
    return data.held[id]


def _count(data, id):
    data.held["count"] = data.held.get("count", 0) + 1
    return torch.tensor([data.held["count"]]), id


@pytest.mark.parametrize("workers", [0, 1])
def test_an_item_that_draws_from_what_is_not_seeded_is_named_at_the_start(workers, capsys):
    silent = (
        lambda data, id: (torch.rand(1) + np.random.rand(), id),
        lambda data, id: data.held.setdefault(id, (torch.zeros(2), id)),  # kept after the first read
    )
    for item in silent:
        loader(Items(item), workers).close()
    assert capsys.readouterr().out == ""
    drawn = (
        lambda data, id: (torch.tensor(list(os.urandom(8))), id),
        lambda data, id: (torch.tensor(np.random.default_rng().random()), id),
        lambda data, id: (torch.tensor(torch.initial_seed()), id),
        _count,
    )
    for item in drawn:
        loader(Items(item), workers).close()
        line = capsys.readouterr().out
        assert line.startswith("warning: sample 0 of Items differs") and line.count("\n") == 1
    # kept after the first read, and random: the first sample is read twice until it is known to draw
    loader(Items(_keep), workers).close()
    assert capsys.readouterr().out.startswith("warning: sample 3 of Items differs")


@dataclass
class Sample:
    value: float
    label: int


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_fn_that_draws_from_what_is_not_seeded_is_named(workers, capsys):
    def batch(items, noise=None):
        values, labels = zip(*((item.value, item.label) for item in items), strict=True)
        return torch.tensor(values) + (torch.rand(1) if noise is None else noise()), torch.tensor(labels)

    def refuse(items):
        raise ValueError("too few") if len(items) < SIZE else batch(items)

    for collate_fn in (batch, refuse):
        loader(Items(lambda data, id: Sample(id, 0)), workers, collate_fn=collate_fn).close()
    assert capsys.readouterr().out == ""
    collate_fn = functools.partial(batch, noise=lambda: os.urandom(1)[0] % 2)
    loader(Items(lambda data, id: Sample(id, 0)), workers, collate_fn=collate_fn).close()
    assert capsys.readouterr().out.startswith("warning: collate_fn ")
    table = TensorDataset(torch.zeros(64, 1), torch.zeros(64))
    noisy = lambda items: [each + os.urandom(1)[0] for each in default_collate(items)]  # noqa: E731
    loader(table, workers, collate_fn=noisy).close()
    assert capsys.readouterr().out.startswith("warning: collate_fn ")
    loader(Items(lambda data, id: Sample(os.urandom(1)[0], 0)), workers, collate_fn=batch).close()
    assert capsys.readouterr().out.startswith("warning: sample ")


def test_an_item_that_depends_on_its_worker_is_named(capsys):
    loader(Items(lambda data, id: (torch.tensor(get_worker_info().id), id)), 2).close()
    assert "differs in two workers" in capsys.readouterr().out


X = torch.zeros(3, 8, 8)
NO_BATCH = {
    "size": (lambda id: (torch.zeros(3, 8 + id // 5, 8), 0), "sample 5 .*3, 9, 8.*3, 8, 8.*shape"),
    "pil": (lambda id: (Image.new("RGB", (8, 8)), 0), r"sample \d of Items is \(Image, int\).*ToTensor"),
    "key": (lambda id: {"x": X, "label": 0} | ({"y": X} if id == 5 else {}), "sample 5 .*y: float32"),
    "ragged": (lambda id: ([0] * (1 + id // 5), 0), r"sample 5 .*\(int, int\)"),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", NO_BATCH)
def test_items_that_are_no_batch_are_named_with_the_way_out(kind, workers):
    item, expected = NO_BATCH[kind]
    batches = loader(Items(lambda data, id: item(id), 6), workers, batch=6)
    with batches, pytest.raises(BadInput, match=f"(?s)^(?=sample ).*{expected}.*collate_fn$"):
        list(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_users_code_keeps_its_traceback_and_gets_the_samples_number(workers):
    def fail(data, id):
        raise OSError("bad file")

    with pytest.raises(RuntimeError, match=r"sample 0 of Items raised OSError\('bad file'\)"):
        loader(Items(fail), workers)
    rows = Items(lambda data, id: (X, 0), 8)
    batches = loader(rows, workers, collate_fn=lambda items: items[0].nothing)
    with batches, pytest.raises(RuntimeError, match=r"collate_fn raised Attribute.* for samples \[\d+, "):
        list(batches)


def test_tensors_without_plain_numbers_are_read_or_named():
    sparse = [torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse()]
    both = [loader(Items(lambda data, id, each=each: (each, 0), 8)) for each in sparse]
    assert both[0].receipt.fingerprint != both[1].receipt.fingerprint
    with pytest.raises(BadInput, match=r"sample 0 of Items .*return ordinary tensors"):
        loader(Items(lambda data, id: (torch.zeros(2, device="meta"), 0), 8))


def test_targets_that_a_model_has_computed_are_taken_without_its_graph():
    table = TensorDataset(torch.arange(8.0), torch.arange(8.0, requires_grad=True) * 2)
    [[_, targets]] = loader(table)
    assert targets.requires_grad and sorted(targets.tolist()) == [2.0 * id for id in range(8)]


MASKS = torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[0, 255], [1, 2]])


@pytest.mark.parametrize("target", [MASKS[1], 255], ids=["mask", "label"])
def test_a_target_for_a_class_that_the_model_lacks_is_named_with_its_sample(target):
    usual = MASKS[0] if isinstance(target, torch.Tensor) else 0
    batches = loader(Items(lambda data, id: (torch.zeros(3, 2, 2), target if id == 5 else usual), 8))
    for inputs, targets in batches:
        logits = inputs if isinstance(target, torch.Tensor) else inputs.flatten(1)
        with pytest.raises(IndexError) as error:
            torch.nn.functional.cross_entropy(logits, targets)
        assert batches.explain(error.value).startswith("sample 5 of Items has the target 255")
        assert batches.explain(IndexError("Target 7 is out of bounds.")) == ""
    assert batches.explain(error.value) == ""  # the loop has given the batch back


def test_targets_of_all_samples_in_one_row_leave_the_error_of_the_loss_as_it_is():
    """A number of boxes for each sample, as of detection: no target belongs to a place in the batch."""

    def together(items):
        return torch.stack([inputs for inputs, _ in items]), torch.cat([targets for _, targets in items])

    items = Items(lambda data, id: (torch.zeros(3), torch.full((1 + id,), 7)), 8)
    batches = loader(items, collate_fn=together)
    next(iter(batches))
    assert batches.explain(IndexError("Target 7 is out of bounds.")) == ""


def test_a_sample_of_a_dataloader_has_no_number():
    """It does not tell which samples it has read."""
    table = TensorDataset(torch.arange(4.0), torch.full((4,), 7))
    batches = torch_loader(DataLoader(table, 2), torch.device("cpu"))
    next(iter(batches))
    line = batches.explain(IndexError("Target 7 is out of bounds."))
    assert line.startswith("a sample of TensorDataset has the target 7")
