"""A receipt of any loop: equal for equal samples at any world size, and it names what a restart did wrong."""

import collections
import os
import re
import time

import numpy as np
import pytest
import torch

from bootfile.ground.errors import BadInput
from bootfile.ground.files import sha256_file
from bootfile.receipt import cli, steps
from bootfile.receipt.cli import report
from bootfile.receipt.contents import hash_batch, hash_ids
from bootfile.receipt.loop_receipt import Receipt
from bootfile.receipt.one_run import Options
from bootfile.receipt.reading import read
from tests.conftest import names

DATA = torch.rand(48, 3, 8, 8, generator=torch.Generator().manual_seed(0))
STEPS = 12  # of an epoch: batches of 4


def order(epoch):
    return torch.randperm(len(DATA), generator=torch.Generator().manual_seed(epoch))


def batches(epochs, world_size=1, rank=0, orders=order):
    """Return the batches of some epochs: [{"id": [n], "image": [n, 3, 8, 8]}] for each epoch."""
    local = 4 // world_size
    parts = [orders(epoch).view(-1, 4)[:, rank * local :][:, :local] for epoch in epochs]
    return [[{"id": ids, "image": DATA[ids]} for ids in part] for part in parts]


def record(folder, epochs, first_step=None, stop=None, **options):
    """Read epochs of batches as a program would that is started once, up to `stop` batches."""
    receipt, count = Receipt(str(folder), first_step=first_step, **options), 0
    for epoch in epochs:
        for _ in receipt.watch(epoch):
            count += 1
            if count == stop:
                return


def compare(tmp_path, *names):
    return steps.compare(*(read(str(tmp_path / name)) for name in names))


def report_both(*folders):
    folders = [str(folder) for folder in folders]
    return report(folders, [read(folder) for folder in folders], Options())


@pytest.mark.parametrize("ids", [None, "id", lambda batch: [f"file {each}" for each in batch["id"]]])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_digest_of_a_step_does_not_depend_on_the_number_of_ranks(tmp_path, ids, world_size):
    record(tmp_path / "one", batches([1, 2]), ids=ids)
    for rank in range(world_size):
        part = batches([1, 2], world_size, rank)
        record(tmp_path / "all", part, rank=rank, world_size=world_size, ids=ids)
    assert compare(tmp_path, "one", "all") == (True, "equal for 24 steps")


def _restart(tmp_path, epochs, first=None, world_size=1):
    """A run of 15 steps that is killed, and its restart with the given batches."""
    for rank in range(world_size):
        record(tmp_path / "run", batches([1, 2], world_size, rank), 0, 15, rank=rank, world_size=world_size)
    record(tmp_path / "run", epochs, first)


def _rest(epoch, first, last=STEPS):
    return batches([epoch])[0][first:last]


def _mix(epoch):
    """Return one batch of two samples of the first batch, and two of the last one."""
    ids = torch.cat([epoch[0]["id"][:2], epoch[-1]["id"][:2]])
    return [{"id": ids, "image": DATA[ids]}]


RESTARTS = {  # the batches of a restart after step 13, and what the comparison with a whole run says
    "exact": ([_rest(2, 1), *batches([3])], "equal for 36 steps"),
    "skipped": ([_rest(2, 3), *batches([3])], "steps 14-15 were skipped"),
    "the epoch again": (batches([2, 3]), "the samples of steps 13-36 were read again"),
    "order of the first epoch": ([_rest(1, 1), *batches([3])], "the samples of steps 2-12 were read again"),
    "reordered": ([_rest(2, 1)[::-1], *batches([3])], "steps 14-24 were reordered"),
    "another order": ([_rest(7, 1), *batches([3])], r"\b4 samples .*twice and 4 skipped"),
    "mixed": ([_mix(_rest(2, 1))], r"step 14 on: 0 samples .*twice and 2 skipped .*step 14$"),
    "other data": (
        [[{"id": each["id"], "image": each["image"] + 1} for each in _rest(2, 1)]], "other samples",
    ),
    "other sizes": ([[{"id": each["id"][:2]} for each in _rest(2, 1)]], "4 and 2 samples"),
}  # fmt: skip


@pytest.mark.parametrize("knows_its_step", [True, False])
@pytest.mark.parametrize("name", RESTARTS)
def test_what_a_restart_did_is_named(tmp_path, name, knows_its_step):
    epochs, expected = RESTARTS[name]
    record(tmp_path / "whole", batches([1, 2, 3]))
    _restart(tmp_path, epochs, 13 if knows_its_step else None)
    equal, text = compare(tmp_path, "whole", "run")
    if knows_its_step or name not in ("skipped", "the epoch again"):
        assert equal == (name == "exact") and (re.search(expected, text) or not knows_its_step)
    else:  # what the restart says is all that is known
        assert "start 2 continues at step " in "".join(steps.follow(read(str(tmp_path / "run"))).lines)


NESTED = {
    "tuple of tensors": lambda n: (torch.arange(n * 6.0).view(n, 6), torch.arange(n)),
    "dictionary": lambda n: {"text": [f"t{k}" for k in range(n)], "x": torch.arange(n * 3).view(n, 3)},
    "list of dictionaries": lambda n: [{"x": torch.full((k % 2 + 1,), 2.0 * k), "n": k} for k in range(n)],
    "images of several sizes": lambda n: (
        tuple(torch.full((3, k % 2 + 4, 4), float(k)) for k in range(n)),
        tuple({"boxes": torch.full((k % 3, 4), float(k))} for k in range(n)),
    ),
    "named tuple, constant, text": lambda n: (
        Pair(torch.arange(n), torch.arange(n).half()), 0.5, "train", np.arange(n * 2).reshape(n, 2),
    ),
    "array of texts": lambda n: (torch.zeros(n, 2), np.array([f"{id}.jpg" for id in range(n)])),
    "half and bool": lambda n: [torch.arange(n).bfloat16(), torch.arange(n) > 2],
}  # fmt: skip
Pair = collections.namedtuple("Pair", "first second")


@pytest.mark.parametrize("name", NESTED)
def test_nested_batches_are_divided_into_samples(name):
    whole, part = (hash_batch(NESTED[name](n)) for n in (8, 5))
    assert len(whole) == 8 and np.array_equal(whole[:5], part)
    assert len(set(whole.tolist())) == (2 if name == "half and bool" else 8) or name == "half and bool"


def test_texts_of_numpy_are_texts():
    names = ["a.jpg", "b.jpg"]
    for texts in (np.array(names), [*np.array(names)], np.array(names, object)):
        assert hash_ids(texts).tolist() == hash_ids(names).tolist()
        assert hash_batch([torch.zeros(2), texts]).tolist() == hash_batch([torch.zeros(2), names]).tolist()


def test_each_hashed_byte_counts_and_the_layout_does_not():
    images = torch.rand(4, 3, 64, 64)
    wide = images.to(memory_format=torch.channels_last)
    assert np.array_equal(hash_batch(images), hash_batch(wide))
    changed = images.clone()
    changed[2, 1:2] += 0.1  # a region, as every augmentation changes one
    assert (hash_batch(images) != hash_batch(changed)).tolist() == [False, False, True, False]
    small, other = torch.zeros(2, 64), torch.zeros(2, 64)
    for place in range(64):
        other[0, place] = 1
        assert (hash_batch(small) != hash_batch(other)).tolist() == [True, False]
    assert (hash_batch(small) != hash_batch(small.double())).all()
    assert (hash_batch(small) != hash_batch(small.view(2, 8, 8))).all()


def test_the_hashes_are_those_of_earlier_versions():
    """So a receipt can be compared with an older one. 64 lines of 64 bytes are hashed, in any layout."""
    images = (torch.arange(2 * 3 * 60 * 60) % 251).view(2, 3, 60, 60)
    known = {
        torch.uint8: 0xC4CD68A458C5BD2F,
        torch.float32: 0xCD909E81EAE34056,
        torch.float64: 0xF3956806B68D6D1B,
    }
    for dtype, expected in known.items():
        typed = images.to(dtype)
        layouts = [typed, typed.to(memory_format=torch.channels_last), typed.mT.contiguous().mT]
        layouts.append(torch.stack([typed, typed], 1)[:, 0])
        hashes = [hash_batch(each).tolist() for each in layouts]
        assert hashes == hashes[:1] * 4 and hashes[0][0] == expected
    assert hash_batch(images[:1].expand(2, -1, -1, -1)).tolist() == hash_batch(images[:1]).tolist() * 2
    assert hash_batch(torch.arange(8)[::4])[0] == 0xDDC9DF959E8900C5
    assert hash_batch(torch.arange(8)[::4][:1])[0] == 0xDDC9DF959E8900C5  # one sample has a stride, too


GRAPHS = {
    "object": object,
    "sparse_coo": lambda: torch.eye(2).to_sparse(),
    "sparse": lambda: [{"adjacency": torch.eye(2).to_sparse()} for _ in range(2)],
    "nested": lambda: torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", GRAPHS)
def test_what_cannot_be_hashed_needs_ids(kind, tmp_path):
    batch = {"id": torch.arange(2), "graph": GRAPHS[kind]()}
    with pytest.raises(BadInput, match=kind):
        Receipt(str(tmp_path / "a")).add(batch)
    Receipt(str(tmp_path / "a"), ids="id").add(batch)
    assert read(str(tmp_path / "a")).starts[0].steps.sums[0, 1] == 2


def test_a_start_without_a_record_of_another_rank_is_left_out(tmp_path):
    record(tmp_path / "whole", batches([1, 2]))
    record(tmp_path / "run", batches([1, 2], 2, 0), 0, 5, rank=0, world_size=2)  # rank 1 has read nothing
    for rank in range(2):
        record(tmp_path / "run", batches([1, 2], 2, rank), 0, rank=rank, world_size=2)
    equal, lines = report_both(tmp_path / "whole", tmp_path / "run")
    assert equal and len(lines) == 3 and lines[-1] == "data equal for 24 steps"


def test_steps_without_a_record_are_not_compared(tmp_path):
    """A receipt may begin in the middle of a training, or lack the steps between two starts."""
    record(tmp_path / "whole", batches([1, 2, 3]))
    record(tmp_path / "late", [_rest(2, 1), *batches([3])], 13)
    equal, lines = report_both(tmp_path / "whole", tmp_path / "late")
    assert not equal and lines[1].endswith("late: 36 steps, 13 without a record")
    assert names(lines[-1], "equal", "23 steps", "no record")
    record(tmp_path / "other", [_rest(7, 1), *batches([3])], 13)
    assert "different from step 14 on: " in report_both(tmp_path / "whole", tmp_path / "other")[1][-1]
    record(tmp_path / "gap", batches([1, 2]), 0, 15)
    record(tmp_path / "gap", [_rest(2, 8), *batches([3])], 20)
    folder = str(tmp_path / "gap")
    equal, lines = report([folder], [read(folder)], Options())
    assert not equal and len(lines) == 2
    assert names(lines[1], "start 2", "step 21", "steps 16-20", "no record")


def test_files_that_end_in_a_record_are_continued(tmp_path):
    record(tmp_path / "whole", batches([1, 2]))
    record(tmp_path / "run", batches([1, 2]), stop=9)
    for name in ("receipt-0.bin", "samples-0.bin"):
        os.truncate(tmp_path / "run" / name, os.path.getsize(tmp_path / "run" / name) - 5)
    record(tmp_path / "run", [_rest(1, 5), *batches([2])])
    equal, lines = report_both(tmp_path / "whole", tmp_path / "run")
    assert equal
    assert any(names(line, "start 2", "step 6", "steps 6-8", "twice", "same samples") for line in lines)


def test_other_augmentation_of_the_same_samples(tmp_path):
    record(tmp_path / "a", batches([1]), ids="id")
    noisy = [[{**batch, "image": batch["image"] * (1 + (k > 4))} for k, batch in enumerate(batches([1])[0])]]
    record(tmp_path / "b", noisy, ids="id")
    assert names(compare(tmp_path, "a", "b")[1], "different", "step 6", "same samples", "contents")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: os.remove(run / "receipt-0.bin"), "no receipt of a run"),
        (lambda run: os.remove(run / "receipt-1.bin"), "receipt-1.bin"),
        (lambda run: os.truncate(run / "samples-1.bin", 8), "cut or damaged"),
        (lambda run: os.remove(run / "samples-1.bin"), "samples-1.bin"),
        (lambda run: os.truncate(run / "receipt-1.bin", 0), "cut or damaged"),
        (lambda run: os.truncate(run / "receipt-1.bin", 32), "no step of all"),
        (lambda run: os.truncate(run / "receipt-1.bin", 100), "cut or damaged"),
        (lambda run: (run / "receipt-0.bin").write_bytes(b"x" * 320), "cut or damaged"),
    ],
)
def test_damaged_receipts_are_one_error(tmp_path, damage, message):
    for rank in range(2):
        record(tmp_path / "run", batches([1], 2, rank), rank=rank, world_size=2)
    damage(tmp_path / "run")
    with pytest.raises(BadInput, match=message):
        read(str(tmp_path / "run"))


def test_other_data_and_other_seeds_are_refused(tmp_path):
    record(tmp_path / "a", batches([1]), seed=0)
    record(tmp_path / "b", batches([1]), seed=1)
    with pytest.raises(BadInput, match="seeds 0 and 1"):
        compare(tmp_path, "a", "b")
    record(
        tmp_path / "c", [[{"id": each["id"], "image": -each["image"]} for each in batches([1])[0]]], seed=0
    )
    with pytest.raises(BadInput, match="other data"):
        compare(tmp_path, "a", "c")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ("RUN", "RUN_A", "RUN_B", 0)),
        (["a", "b", "c"], ("RUN", "RUN_A", "RUN_B", 3)),
        (["a", "--nope"], ("--nope",)),
        (["a", "a", "--repeats"], ("--repeats", "--same_order", "--augmented")),
        (["gone"], ("gone/receipt.bin",)),
    ],
)
def test_a_wrong_command_is_one_line(words, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "a", batches([1]))
    with pytest.raises(BadInput) as refusal:
        cli.main(words)
    assert names(str(refusal.value), *parts) and "\n" not in str(refusal.value)


SHA256 = {  # digests of the files of the run below, as version 0.31 has written them
    "receipt-0.bin": "0d2e55ac7ea701c82c0b96c7519ee6b24d52094c80062afc2b140f7866a47ced",
    "samples-0.bin": "417e282d9f3e75641fd6bf676423e6b597a7a3a2766b6c6addef2d7f12302386",
}


def test_the_bytes_are_those_of_earlier_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    data = torch.arange(72.0).view(24, 3) / 7
    receipt = Receipt(str(tmp_path), ids="id")
    for factor in (5, 7, 11):
        order = torch.tensor([number * factor % len(data) for number in range(len(data))])
        assert len(list(receipt.watch([{"id": part, "x": data[part]} for part in order.split(4)]))) == 6
    assert {name: sha256_file(str(tmp_path / name)) for name in SHA256} == SHA256
