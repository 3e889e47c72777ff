"""One run is enough to see epochs with one order, samples that come twice or never, and ranks with the same
samples. A correct run gives no line."""

import json
import re

import numpy as np
import pytest
import torch

from bootfile.receipt import cli, reading
from bootfile.receipt import receipt as loader_receipt
from bootfile.receipt.cli import report
from bootfile.receipt.loop_receipt import Receipt
from bootfile.receipt.one_run import Options
from bootfile.receipt.recorded_run import Run
from bootfile.sampling.removal import write_removed
from bootfile.sampling.sampler import BatchSampler, WholeBatchSampler
from tests.conftest import names

SIZE, BATCH = 64, 8
DATA = torch.rand(SIZE, 4, generator=torch.Generator().manual_seed(0))
EQUAL = torch.cat([DATA[:-1], DATA[:1]])  # the last sample has the content of the first


def shuffled(epoch, count=SIZE):
    return torch.randperm(count, generator=torch.Generator().manual_seed(epoch))


def shuffled_epochs(count=3):
    return [shuffled(epoch) for epoch in range(count)]


def half_twice(epoch):
    half = shuffled(epoch)[: SIZE // 2].repeat(2)
    return half[shuffled(epoch + 9)]


def with_replacement(epoch):
    return torch.randint(0, SIZE, (SIZE,), generator=torch.Generator().manual_seed(epoch))


def padded(epoch):
    """As DistributedSampler does with 63 samples on two ranks."""
    return torch.cat([shuffled(epoch, SIZE - 1), shuffled(epoch, SIZE - 1)[:1]])


def read(folder, orders, ids="id", data=DATA, world_size=1, is_divided=True, noise=0.0, first_step=None):
    """Record a start of a run: the samples of each epoch in the given order."""
    for rank in range(world_size):
        receipt = Receipt(str(folder), rank=rank, world_size=world_size, ids=ids, first_step=first_step)
        generator = torch.Generator().manual_seed(rank)
        for order in orders:
            part = order[rank::world_size] if is_divided else order
            batches = []
            for chosen in part.split(BATCH // world_size):
                images = data[chosen]
                images = images + noise * torch.rand(images.shape, generator=generator)
                batches.append({"id": chosen, "image": images})
            assert len(list(receipt.watch(batches))) == len(batches)


def judge(folder, **usual):
    """Return the unusual lines about a run."""
    is_right, lines = report([str(folder)], [reading.read(str(folder))], Options(**usual))
    found = [line.removeprefix("unusual: ") for line in lines if line.startswith("unusual: ")]
    assert is_right == (not found)
    return found


by_ids_or_contents = pytest.mark.parametrize("ids", ["id", None])

CORRECT = {
    "a new order in each epoch": {"orders": shuffled_epochs()},
    "two ranks": {"orders": shuffled_epochs(), "world_size": 2},
    "four ranks, augmentation": {"orders": shuffled_epochs(), "world_size": 4, "noise": 1.0},
    "an incomplete batch is left out": {"orders": [each[:60] for each in shuffled_epochs()]},
    "the last epoch is cut": {"orders": [*shuffled_epochs(2), shuffled(2)[:24]]},
    "two samples of equal content": {"orders": shuffled_epochs(), "data": EQUAL},
    "one epoch": {"orders": shuffled_epochs(1)},
    "one step an epoch": {"orders": [torch.arange(BATCH)] * 3},
    "more epochs than are counted": {"orders": shuffled_epochs(30), "world_size": 2},
}


@by_ids_or_contents
@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_run_gives_no_line(name, ids, tmp_path):
    read(tmp_path, ids=ids, **CORRECT[name])
    assert judge(tmp_path) == []


@by_ids_or_contents
def test_the_same_order(ids, tmp_path):
    read(tmp_path, [shuffled(0), shuffled(1), shuffled(0), shuffled(0)[:24]], ids, world_size=2)
    assert judge(tmp_path) == ["epochs 1, 3 and 4 have the same order, from step 17 on"]
    assert judge(tmp_path, same_order=True) == []


def test_many_epochs_are_shortened(tmp_path):
    read(tmp_path, [shuffled(0)] * 9)
    assert judge(tmp_path) == ["epochs 1, 2, ... and 9 have the same order, from step 9 on"]


@by_ids_or_contents
def test_samples_that_come_twice(ids, tmp_path):
    read(tmp_path / "half", [half_twice(epoch) for epoch in range(3)], ids)
    found = judge(tmp_path / "half")
    assert [line.partition(" samples")[0] for line in found] == [f"epoch {each}: 32" for each in (1, 2, 3)]
    assert judge(tmp_path / "half", repeats=True) == []
    read(tmp_path / "padded", [padded(epoch) for epoch in range(3)], ids, world_size=2)
    found = judge(tmp_path / "padded")
    assert names(found[1], "epoch 2", "1 sample", "twice", "step 16")
    read(tmp_path / "drawn", [with_replacement(epoch) for epoch in range(6)], ids)
    *found, last = judge(tmp_path / "drawn")
    assert len(found) == 4 and last == "2 more epochs with such samples"


def test_several_epochs_in_one_call_of_watch_are_named_as_the_cause(tmp_path):
    all_epochs = [torch.cat([shuffled(epoch) for epoch in range(3)])]
    read(tmp_path / "once", all_epochs)
    [line] = judge(tmp_path / "once")
    assert "epoch 1: " in line and "watch()" in line
    read(tmp_path / "half", [half_twice(epoch) for epoch in range(3)])
    assert not any("watch()" in line for line in judge(tmp_path / "half"))


def test_the_same_samples_twice_in_each_epoch(tmp_path):
    """Without ids a tenth of the samples may be equal, but not a half."""
    order = torch.arange(SIZE // 2).repeat(2)
    read(tmp_path, [order[shuffled(epoch)] for epoch in range(3)], None)
    assert len(judge(tmp_path)) == 3


def test_samples_that_never_come(tmp_path):
    order = shuffled(1)
    read(tmp_path, [shuffled(0), order[order < 40], shuffled(2)])
    [line] = judge(tmp_path)
    assert names(line, "epoch 2", "24 samples", "never")
    read(tmp_path / "batch", [shuffled(0), order[order < SIZE - BATCH], shuffled(2)])
    [line] = judge(tmp_path / "batch")
    assert names(line, "epoch 2", f"{BATCH} samples", "never")


@by_ids_or_contents
def test_the_same_samples_on_two_ranks(ids, tmp_path):
    read(tmp_path, shuffled_epochs(2), ids, world_size=2, is_divided=False)
    *_, last = judge(tmp_path)
    assert last == "ranks 0 and 1 were given the same samples in step 1, and in 31 more"
    assert judge(tmp_path, repeats=True) == []


@by_ids_or_contents
def test_augmentation_that_repeats(ids, tmp_path):
    read(tmp_path / "new", shuffled_epochs(), ids, noise=1.0)
    read(tmp_path / "same", shuffled_epochs(), ids)
    assert judge(tmp_path / "new", augmented=True) == judge(tmp_path / "same") == []
    [line] = judge(tmp_path / "same", augmented=True)
    assert names(line, "epochs 1, 2 and 3" if ids else "128 samples", "same content")


@by_ids_or_contents
@pytest.mark.parametrize("first", [13, None])
def test_a_restart_continues_its_epoch(first, ids, tmp_path):
    """Its loop counts from 1 again. The order of the first epoch in a later one is seen over the restart."""
    read(tmp_path, [shuffled(0), shuffled(1)[: 5 * BATCH]], ids)
    read(tmp_path, [shuffled(1)[5 * BATCH :], shuffled(2)], ids, first_step=first)
    assert judge(tmp_path) == []
    read(tmp_path, [shuffled(0)], ids, first_step=first and 24)
    if first:
        assert judge(tmp_path) == ["epochs 1 and 4 have the same order, from step 25 on"]


def test_a_restart_that_begins_the_next_epoch(tmp_path):
    """The rest of an epoch that was cut never comes."""
    read(tmp_path, [shuffled(0)[: 3 * BATCH]])
    read(tmp_path, [shuffled(1), shuffled(2)], first_step=3)
    assert judge(tmp_path) == []


def test_a_restart_continues_near_the_end(tmp_path):
    """If its first steps were read in several epochs, the last of these is the likely one."""
    read(tmp_path, [shuffled(0)] * 2)
    read(tmp_path, [shuffled(0)])
    _, lines = report([str(tmp_path)], [reading.read(str(tmp_path))], Options(same_order=True))
    assert "start 2 continues at step 9: steps 9-16 were read twice, with the same samples" in lines


def write_run(folder, sampler, removed=(), **facts):
    """Write the receipt of two epochs of a Loader, and the line of its start. removed: --without."""
    folder.mkdir()
    chain, steps = loader_receipt.Receipt(), len(sampler)
    for step in range(2 * steps):
        ids = sampler.batch(step)
        rest = ids[~np.isin(ids, removed)]
        chain.add(rest, np.zeros(len(rest)))
    chain.chain(2 * steps, steps, chain.take(), str(folder))
    if len(removed):
        write_removed(str(folder), np.sort(removed))
    sampling = {"samples": sampler.size, "global batch": BATCH, "seed": 0, "views": 1, "shuffle": True}
    start = {"step": 0, "settings": {}, "environment": {"world size": 1}}
    start["sampling"] = sampling | {"sampler": type(sampler).__name__} | facts
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    return str(folder)


def test_a_run_of_a_loader_in_an_order_of_its_own(tmp_path, capsys):
    in_order = WholeBatchSampler(SIZE - 1, BATCH, 0, shuffle=False)
    cut = BatchSampler(SIZE, BATCH, 0, epoch_steps=3)
    for number, (sampler, facts, code) in enumerate((
        (in_order, {"shuffle": False}, 0), (in_order, {}, 1), (cut, {"epoch steps": 3}, 0), (cut, {}, 1),
    )):  # fmt: skip
        assert cli.main([write_run(tmp_path / str(number), sampler, **facts)]) == code
        assert ("unusual: " in capsys.readouterr().out) == bool(code)


def test_the_ranks_of_the_samples_of_a_step(tmp_path):
    """Exact shards are divided among the ranks as they are, also if not equally."""
    sampler = BatchSampler(SIZE, BATCH, 0)
    folder = tmp_path / "run"
    write_run(folder, sampler)
    for shards, expected in ((None, [0, 0, 0, 0, 1, 1, 1, 1]), (8, [0, 0, 1, 1, 1, 2, 2, 2])):
        start = json.loads((folder / "starts.jsonl").read_text())
        start["settings"] = {"exact_shards": shards}
        start["environment"] = {"world size": 3 if shards else 2}
        (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
        run = Run(str(folder))
        assert run.ranks(run.sampler(3), 3).tolist() == expected


def test_two_runs_of_which_one_lacks_samples_are_compared_without_these(tmp_path, capsys):
    sampler = BatchSampler(SIZE, BATCH, 0)
    removed = sampler.batch(2)[:1]
    whole = write_run(tmp_path / "whole", sampler)
    for other, words in (
        (sampler, r"steps 3, 1\d were without some samples in one run, the other ids are equal"),
        (BatchSampler(SIZE, BATCH, 1), "step 3 had other samples, also without those that were removed"),
    ):
        folder = write_run(tmp_path / str(other.seed), other, removed=removed)
        assert cli.main([whole, folder]) == 1
        assert re.search(words, capsys.readouterr().out)


def test_a_step_of_which_all_samples_were_removed_is_not_one_of_skip_steps(tmp_path, capsys):
    sampler = BatchSampler(SIZE, BATCH, 0)
    assert cli.main([write_run(tmp_path / "run", sampler, removed=sampler.batch(2))]) == 0
    shown = capsys.readouterr().out
    assert "removed (--without)" in shown and "--skip_steps" not in shown


def test_an_option_says_what_is_right(tmp_path, capsys):
    read(tmp_path / "run", [shuffled(0)] * 2, world_size=2)
    assert cli.main([str(tmp_path / "run")]) == 1
    unusual = "16 steps\nunusual: epochs 1 and 2 have the same order, from step 9 on\n"
    assert capsys.readouterr().out.endswith(unusual)
    assert cli.main([str(tmp_path / "run"), "--same_order"]) == 0
    assert capsys.readouterr().out.endswith("16 steps\n")
