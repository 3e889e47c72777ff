"""The receipt depends on the delivered data only, and is cheap."""

import argparse
import contextlib
import hashlib
import json
import os

import numpy as np
import pytest
import torch

from bootfile.ground.errors import BadInput
from bootfile.receipt import compare, receipt
from bootfile.receipt.compare import compare_runs
from bootfile.receipt.reading import read, read_records
from bootfile.receipt.receipt import Receipt
from bootfile.receipt.steps import Difference, find_difference
from bootfile.records import METRICS, STARTS
from bootfile.sampling.removal import parse_ids
from bootfile.sampling.sampler import BatchSampler
from common.run import starts
from datasets.loaders.engines.memory import make_loader
from datasets.memory.digits import load
from datasets.sampling.augment import crop_flip
from tests.conftest import names, run


def _run(folder, world_size=1, steps=9, seed=0, stop=None, epoch=1):
    """Deliver batches of digits to `world_size` processes without training. Restart after step `stop`."""
    folder.mkdir(exist_ok=True)
    data, _ = load(None, False)
    orders = [
        BatchSampler(len(data), 48, seed, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    loaders = [make_loader(data, order, torch.device("cpu"), augment=True) for order in orders]
    chain = loaders[0].receipt
    for loader in loaders:
        loader.seek((epoch - 1) * len(loader))
    batches = [iter(loader) for loader in loaders]
    for step in range(1, steps + 1):
        for iterator in batches:
            next(iterator)
        if step % 4 == 0 or step in (steps, stop):
            sums = sum(loader.receipt.take() for loader in loaders)  # the result of all_reduce()
            chain.chain(step, len(loaders[0]), sums, str(folder))
        if step == stop:
            saved = chain.state_dict()
            lost = np.ones((1, 3), np.int64)
            chain.chain(step + 1, len(loaders[0]), lost, str(folder))
            chain = Receipt()
            chain.load_state_dict(saved)
    return str(chain)


def steps(folder):
    """Return the steps of the receipt in a folder."""
    return read(str(folder)).starts[0].steps


def test_world_size_and_restarts_do_not_change_it(tmp_path):
    digests = {
        _run(tmp_path / "one"),
        _run(tmp_path / "two", world_size=2),
        _run(tmp_path / "four", world_size=4),
        _run(tmp_path / "restarted", stop=6),
    }
    assert len(digests) == 1
    records = [read_records(str(tmp_path / name)) for name in ("one", "two", "four", "restarted")]
    assert all((each == records[0]).all() for each in records) and len(records[0]) == 9
    assert find_difference(steps(tmp_path / "one"), steps(tmp_path / "restarted")) == Difference(9, 0, 0, ())


def test_it_holds_every_sample_exactly_once():
    order, chain, expected = BatchSampler(1438, 48, 3), Receipt(), 0
    order.seek(len(order))
    for ids in order:
        chain.add(ids, np.zeros(len(ids)))
    total = int(chain.take()[:, 0].copy().view(np.uint64).sum(dtype=np.uint64))
    left_out = set(range(1438)) - {int(each) for ids in order for each in ids}
    every, rest = (Receipt() for _ in range(2))
    every.add(np.arange(1438), np.zeros(1438))
    rest.add(np.array(sorted(left_out)), np.zeros(len(left_out)))
    expected = int(every.take()[0, 0]) - int(rest.take()[0, 0])
    assert total == expected % 2**64


@pytest.mark.parametrize("part", ["ids", "labels", "augmentation"])
def test_the_first_difference_and_its_kind_are_found(tmp_path, part):
    def deliver(folder, change):
        folder.mkdir()
        chain, (data, _) = Receipt(), load(None, False)
        for step in range(1, 11):
            ids, labels = np.arange(8) + 8 * step, np.arange(8) % 3
            parameters = [column.copy() for column in crop_flip(data, ids, 0, 1)]
            if change and step >= 7:
                {"ids": ids, "labels": labels, "augmentation": parameters[0]}[part][2] += 1
            chain.add(ids, labels, parameters)
        chain.chain(10, 10, chain.take(), str(folder))
        return steps(folder)

    found = find_difference(deliver(tmp_path / "a", False), deliver(tmp_path / "b", True))
    assert found == Difference(10, 1, 7, (part,))


def test_order_within_a_batch_does_not_matter_but_pairing_does():
    one, two, three = Receipt(), Receipt(), Receipt()
    one.add(np.array([1, 2, 3]), np.array([5, 6, 7]))
    two.add(np.array([3, 1, 2]), np.array([7, 5, 6]))
    three.add(np.array([1, 2, 3]), np.array([6, 5, 7]))
    sums = [each.take() for each in (one, two, three)]
    assert (sums[0] == sums[1]).all() and (sums[0] != sums[2]).any()


def test_a_float_parameter_counts_to_the_last_bit():
    one, two = Receipt(), Receipt()
    scale = np.float32([0.5, 0.25])
    one.add(np.arange(2), np.zeros(2), [scale])
    two.add(np.arange(2), np.zeros(2), [np.nextafter(scale, np.float32(1))])
    assert (one.take() != two.take()).any()


def test_each_of_many_labels_of_a_sample_counts():
    ids = np.arange(3)
    labels = np.random.default_rng(0).random((3, 70)) > 0.5
    ends = np.array([3])
    sums = {receipt.batch_sums(ids, labels, (), ends).tobytes()}
    for place in range(labels.shape[1]):
        changed = labels.copy()
        changed[1, place] ^= True
        sums.add(receipt.batch_sums(ids, changed, (), ends).tobytes())
    assert len(sums) == 1 + labels.shape[1]


def test_the_digest_is_the_documented_chain():
    """The format must not change: later versions read the receipts in checkpoints."""
    chain = Receipt()
    chain.add(np.array([0]), np.array([0]))
    sums = chain.take()
    chain.chain(1, 1, sums, None)
    # The first output of SplitMix64 with seed 0, as its authors' reference program prints it.
    assert int(sums[0, 0]) % 2**64 == 0xE220A8397B1DCDAF
    record = np.uint32([1, 1]).tobytes() + sums.tobytes()
    assert str(chain) == hashlib.blake2b(bytes(8) + record, digest_size=8).hexdigest()


def test_a_torn_or_foreign_file(tmp_path):
    _run(tmp_path)
    path = tmp_path / receipt.FILE
    for content in (path.read_bytes()[:-5], b"\xff" * 96, b""):
        path.write_bytes(content)
        with pytest.raises(BadInput, match=rf"{receipt.FILE} .*\bcut\b"):
            read(str(tmp_path))
    path.unlink()
    with pytest.raises(BadInput, match=r"no receipt .*: No such file or directory"):
        read(str(tmp_path))


def test_a_link_is_not_written_through(tmp_path, capsys):
    """The output folder may be another user's: a link in it may name any file of this user."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in (receipt.FILE, STARTS):
        (tmp_path / name).symlink_to(mine)
    receipt.Receipt().chain(1, 2, np.zeros((1, 3), np.int64), str(tmp_path))
    assert f"warning: {receipt.FILE} in " in capsys.readouterr().out
    with pytest.raises(OSError, match="symbolic links"):
        starts.write(str(tmp_path), argparse.Namespace(), {})
    assert mine.read_text() == "mine"


@pytest.mark.thorough
def test_a_training_does_not_load_the_programs_of_receipts():
    code = "import sys, bootfile.loaders.torch_loader; print(*sys.modules)"
    loaded = run("-c", code, fresh=True).stdout.split()
    receipts = {name for name in loaded if name.startswith("bootfile.receipt.")}
    assert receipts == {f"bootfile.receipt.{name}" for name in ("contents", "receipt", "records")}


def test_batches_of_a_step_that_comes_again_count_once():
    """An elastic job takes the state of another process in the middle of a step."""
    chain, expected = Receipt(), Receipt()
    for size in (4, 5000):  # of few samples the sums are computed later
        chain.add(np.arange(size), np.zeros(size))
        chain.load_state_dict(chain.state_dict())
        for each in (chain, expected):
            each.add(np.arange(8), np.zeros(8))
        assert np.array_equal(chain.take(), expected.take())


def _train(folder, steps, first=1):
    """Commit `steps` steps one by one. Return the receipt."""
    chain = Receipt()
    for step in range(first, first + steps):
        chain.add(np.arange(4) + step, np.zeros(4))
        chain.chain(step, 100, chain.take(), str(folder))
    return chain


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.rename(f"{path}.1"),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:50]),
        lambda path: path.write_bytes(path.read_bytes() * 2),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),  # seen at the end only
    ],
)
def test_a_receipt_that_is_changed_while_the_job_runs_is_written_again(tmp_path, capsys, damage):
    """A script that rotates logs may move it, for example. One warning, and the receipt is whole."""
    _train(tmp_path / "whole", 5)
    chain = _train(tmp_path, 3)
    damage(tmp_path / receipt.FILE)
    for step in (4, 5):
        chain.add(np.arange(4) + step, np.zeros(4))
        chain.chain(step, 100, chain.take(), str(tmp_path))
    assert os.path.getsize(tmp_path / receipt.FILE) == 5 * 32, "also if the job is killed now"
    assert chain.finish(str(tmp_path)) == ""
    assert (tmp_path / receipt.FILE).read_bytes() == (tmp_path / "whole" / receipt.FILE).read_bytes()
    [line] = capsys.readouterr().out.splitlines()
    assert names(line, "warning", tmp_path / receipt.FILE, "changed")
    (tmp_path / receipt.FILE).unlink()
    (tmp_path / receipt.FILE).mkdir()
    assert "is not whole" in chain.finish(str(tmp_path))


def test_a_receipt_that_was_damaged_between_two_starts_is_reported(tmp_path, capsys):
    """A restart cannot compute the records of earlier steps again. Also if it has no step to do."""
    for damage, words in (
        (lambda content: content, None),
        (lambda content: content[:-32], "lacks 1 of the steps 1 to 3"),
        (lambda content: bytes(32) + content[32:], "lacks 1 of the steps 1 to 3"),
        (lambda content: content[:8] + bytes(8) + content[16:], "has other records"),
    ):
        saved = _train(tmp_path, 3).state_dict()
        path = tmp_path / receipt.FILE
        path.write_bytes(damage(path.read_bytes()))
        resumed = Receipt()
        resumed.load_state_dict(saved)
        resumed.begins_at(0)
        assert resumed.finish(str(tmp_path)) == ""
        output = capsys.readouterr().out
        assert words in output if words else not output
        path.unlink()


def test_a_receipt_is_open_only_while_it_is_written(tmp_path):
    """On s3fs a new file that is open loses its name when it is also read."""
    _train(tmp_path, 2)
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            assert os.readlink(f"/proc/self/fd/{each}") != str(tmp_path / receipt.FILE)


def test_figures_that_only_one_run_has_are_a_difference(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    start = {"step": 0, "settings": {}, "environment": {}}
    for name, content in ((STARTS, start), (METRICS, {"step": 3, "loss": 1})):
        (tmp_path / "b" / name).write_text(f"{json.dumps(content)}\n")
    for first, second in ("ab", "ba"):
        [line] = compare_runs(str(tmp_path / first), str(tmp_path / second), "*.pt")
        assert not line.equal and line.text == "only one run has step at step 3"


@pytest.mark.parametrize(
    "first, second, expected",
    [
        (torch.tensor([1 + 2j]), torch.tensor([1 + 4j]), 2 / 17**0.5),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0),
        (torch.tensor([3], dtype=torch.uint8), torch.tensor([4], dtype=torch.uint8), 0.25),
        (0.5, 1.0, 0.5),
        ("Adam", "SGD", float("inf")),
        (None, torch.ones(1), float("inf")),
        (torch.ones(1), torch.ones(2), float("inf")),
    ],
)
def test_by_how_much_two_parts_of_a_state_differ(first, second, expected):
    assert compare._difference(first, second) == pytest.approx(expected)


def test_ids_in_a_file_of_windows(tmp_path):
    (tmp_path / "ids.txt").write_bytes("\ufeff17\r\n3\r\n".encode())
    assert parse_ids("--without", str(tmp_path / "ids.txt")).tolist() == [3, 17]
