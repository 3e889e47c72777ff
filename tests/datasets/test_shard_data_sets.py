"""TarShards and ParquetRows deliver samples by number, exactly, with any workers and after a restart."""

import itertools
import os
import pickle
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from bootfile.ground.errors import BadInput
from bootfile.loaders.map_style import map_style_loader
from bootfile.receipt import receipt
from bootfile.sampling.sampler import BatchSampler
from datasets.shards import ParquetRows, TarShards
from tests.conftest import finish, read_until, run_ranks, start_ranks
from tests.jobs.test_resume import same_weights, weights
from tests.jobs.test_train_own import OPTIONS, write_job
from tests.support import tars

COUNT = 90


def decode(sample):
    """Return (input, target) of a sample of either kind, with noise."""
    x = np.frombuffer(sample["bin"], np.float32) if "bin" in sample else np.float32(sample["x"])
    return torch.tensor(x) + 0.01 * torch.rand(4), int(sample.get("cls", sample.get("label")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the same samples in three tars and in two Parquet files."""
    folder = tmp_path_factory.mktemp("shards")
    table = np.random.default_rng(0).random((COUNT, 4), np.float32)
    for shard in range(3):
        rows = range(30 * shard, 30 * shard + 30)
        files = [(f"{n}.{kind}", data) for n in rows for kind, data in _files(table, n)]
        tars.write(folder / f"{shard:03}.tar", files)
    for shard, rows in enumerate((slice(0, 50), slice(50, COUNT))):
        labels = np.arange(COUNT)[rows] % 3
        columns = pyarrow.table({"x": table[rows].tolist(), "label": labels, "unused": ["a"] * len(labels)})
        pyarrow.parquet.write_table(columns, folder / f"{shard}.parquet", row_group_size=7)
    return folder


def _files(table, n):
    return ("bin", table[n].tobytes()), ("cls", str(n % 3).encode())


def data_sets(folder, **options):
    rows = ParquetRows(f"{folder}/*.parquet", columns=["x", "label"], **options)
    return TarShards(f"{folder}/{{000..002}}.tar", **options), rows


def test_samples_by_number(folder):
    tar, rows = data_sets(folder)
    assert len(tar) == len(rows) == COUNT
    for id in (0, 29, 30, 89):
        assert tar[id]["__key__"] == str(id) and tar[id]["cls"] == str(id % 3).encode()
        assert rows[id].keys() == {"x", "label"} and rows[id]["label"] == id % 3
        assert np.frombuffer(tar[id]["bin"], np.float32).tolist() == rows[id]["x"]
    for data in (tar, rows):
        pickled = pickle.dumps(data)
        assert pickle.loads(pickled)[7] == data[7]
        if data is tar:  # as on another node
            os.unlink(data.index.filename)
            assert pickle.loads(pickled)[7] == data[7]
        assert len(pickled) < 1500 + 30 * len(data.paths), "a pickle for a worker has no index of each sample"
        assert data[-1] == data[COUNT - 1] and data[np.int64(-COUNT)] == data[0]
        for id in (COUNT, -COUNT - 1):
            with pytest.raises(IndexError):
                data[id]


@pytest.mark.parametrize("kind", [0, 1], ids=["tar", "parquet"])
def test_batches_are_equal_with_workers_and_after_a_restart(folder, kind, tmp_path):
    cache = tmp_path / "cache"  # the first run makes the index

    def batches(workers, step):
        data = data_sets(folder, transform=decode, cache_dir=str(cache))[kind]
        sampler = BatchSampler(COUNT, 16, 3, 1, None)
        sampler.seek(step)
        with map_style_loader(data, sampler, torch.device("cpu"), workers=workers) as loader:
            return list(loader), loader.plan.index.fingerprint

    alone, fingerprint = batches(0, 0)
    assert len(alone) == 5
    for workers, step in ((2, 0), (1, 3)):
        others, again = batches(workers, step)
        assert again == fingerprint
        for (x, labels), (x2, labels2) in zip(alone[step:], others, strict=True):
            assert torch.equal(x, x2) and torch.equal(labels, labels2)


def test_other_data_have_another_fingerprint(tmp_path):
    numbers = itertools.count()

    def fingerprint(files):
        path = tars.write(tmp_path / f"{next(numbers)}.tar", files)
        data = TarShards(str(path), transform=lambda sample: (len(sample), sample["txt"]))
        with map_style_loader(data, BatchSampler(1, 1, seed=0), torch.device("cpu")) as loader:
            return loader.plan.index.fingerprint

    samples = (
        [("1.txt", b"a")],
        [("1.txt", b"b")],
        [("1.txt", b"a"), ("1.z", b"")],
        [("1.txt", b"a"), ("1.z", b"z")],
    )
    assert len({fingerprint(files) for files in samples}) == 4


def test_a_file_that_is_not_parquet_is_one_line(tmp_path):
    (tmp_path / "0.parquet").write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(BadInput, match=r"0\.parquet .*damaged"):
        ParquetRows(f"{tmp_path}/*.parquet")


def test_each_parquet_file_needs_the_columns_but_no_rows(tmp_path):
    table = pyarrow.table({"x": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "0.parquet")
    pyarrow.parquet.ParquetWriter(tmp_path / "1.parquet", table.schema).close()  # without row groups
    rows = ParquetRows(f"{tmp_path}/*.parquet", columns=["x"])
    assert [rows[id] for id in range(len(rows))] == [{"x": 1}, {"x": 2}]
    assert ParquetRows(f"{tmp_path}/*.parquet", columns=[])[0] == {}
    assert len(ParquetRows(f"{tmp_path}/1.parquet")) == 0
    pyarrow.parquet.write_table(pyarrow.table({"y": [1]}), tmp_path / "2.parquet")
    with pytest.raises(BadInput, match=r"2\.parquet .*no column x; .*\by\b"):
        ParquetRows(f"{tmp_path}/*.parquet", columns=["x"])


def test_files_of_a_sample_are_next_to_each_other(tmp_path):
    path = tars.write(tmp_path / "0.tar", [("1.txt", b"a"), ("2.txt", b"b"), ("1.cls", b"0")])
    with pytest.raises(BadInput, match=r"0\.tar: sample 1: .*\bcls .*not next"):
        TarShards(str(path))


def test_a_cls_may_be_text(tmp_path):
    path = tars.write(tmp_path / "0.tar", [("1.txt", b"a"), ("1.cls", b"cat")])
    assert TarShards(str(path))[0] == {"__key__": "1", "txt": b"a", "cls": b"cat"}


@pytest.mark.thorough
def test_a_job_continues_exactly(folder, tmp_path):
    data = f"""
    import functools
    import numpy as np
    from bootfile.loaders.map_style import map_style_loader
    from datasets.shards import ParquetRows, TarShards
    # - train_set, test_set = image_set.load(args.dataset, args.data_url, args.custom_data)
    def from_tar(sample):
        x = torch.tensor(np.frombuffer(sample["bin"], np.float32))
        return x + 0.01 * torch.rand(4), int(sample["cls"])
    def from_row(row):
        return torch.tensor(row["x"]), row["label"]
    train_set = TarShards("{folder}/*.tar", transform=from_tar)
    test_set = ParquetRows("{folder}/*.parquet", transform=from_row, columns=["x", "label"])
    make_loader = functools.partial(map_style_loader, workers=1)
    """
    model = """
    # -
    # - model = models.resnet18(train_set.channels, train_set.classes, args.width)
    model = torch.nn.Linear(4, 3)
    """
    criterion = """
    # - criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    criterion = torch.nn.CrossEntropyLoss()
    """
    job = write_job(tmp_path / "job", (data, model, criterion), distributed=True)
    options = (*OPTIONS, "--batch_size=10", "--save_every=2")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_ranks(job, *options, f"--output_dir={whole}")
    processes = start_ranks(job, *options, f"--output_dir={killed}")
    read_until(processes[0], r"^epoch=2 step=\d+/.* loss=")
    processes[-1].kill()
    for process in processes:
        finish(process, None)
    printed = run_ranks(job, *options, f"--output_dir={killed}")[0].stdout
    assert re.search(r"resumed from .* step \d+ of 27", printed)
    assert same_weights(weights(killed), weights(whole))
    assert (killed / receipt.FILE).read_bytes() == (whole / receipt.FILE).read_bytes()
