"""A map-style Dataset gives the same tensors and receipts with any workers and ranks, after any restart."""

import contextlib
import gc
import os
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from torchvision.transforms import v2

from bootfile.ground.errors import BadInput
from bootfile.loaders.map_style import draw_seeds, map_style_loader
from bootfile.sampling import generators
from bootfile.sampling.sampler import BatchSampler, SequentialBatchSampler, WholeBatchSampler
from tests.support.checkpointers import log_of

SIZE, BATCH, STEPS = 50, 12, 8  # two epochs of four steps
CPU = torch.device("cpu")


class Photographs(Dataset):
    """A data set with every kind of randomness: global and own generators, torchvision, Albumentations."""

    def __init__(self):
        self.crop = v2.Compose([v2.RandomCrop(8), v2.RandomHorizontalFlip(), v2.ColorJitter(0.5)])
        self.own = np.random.default_rng()
        self.other = torch.Generator()
        self.dropout = None
        with contextlib.suppress(ImportError):
            import albumentations

            self.dropout = albumentations.Compose([albumentations.CoarseDropout(p=1.0)])

    def __len__(self):
        return SIZE

    def __getitem__(self, id):
        pixels = np.full((12, 12, 3), id, np.uint8) + np.arange(12, dtype=np.uint8)[:, None]
        if self.dropout:
            pixels = self.dropout(image=pixels)["image"]
        image = self.crop(torch.from_numpy(pixels).permute(2, 0, 1)).float()
        noise = [random.random(), np.random.rand(), self.own.random()]
        noise += [float(torch.rand(())), float(torch.rand((), generator=self.other))]
        return {"image": image, "noise": torch.tensor(noise), "label": id % 7}


class Words(Dataset):
    """A data set of texts of different lengths, without randomness."""

    def __len__(self):
        return SIZE

    def __getitem__(self, id):
        return torch.arange(id % 9 + 1), torch.tensor([id % 2, id % 3])


class Items(Dataset):
    """A data set of what a function returns for a number."""

    def __init__(self, item, size=SIZE):
        self.item, self.size = item, size

    def __len__(self):
        return self.size

    def __getitem__(self, id):
        return self.item(id)


def pad(items):
    texts, targets = zip(*items, strict=True)
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-1), torch.stack(targets)


def sampler(seed=3):
    return BatchSampler(SIZE, BATCH, seed=seed, max_steps=STEPS)


def batches(dataset, start=0, ranks=1, **options):
    """Return ([inputs and targets of each step, in the order of ranks], receipt sums over the ranks)."""
    steps, sums = [[] for _ in range(STEPS - start)], 0
    for rank in range(ranks):
        part = sampler().for_rank(rank, ranks) if ranks > 1 else sampler()
        loader = map_style_loader(dataset, part, CPU, **options)
        place = 0
        for _ in loader.epochs_from(start):
            for inputs, targets in loader:
                steps[place].append((inputs, targets))
                place += 1
        assert place == len(steps)
        sums = sums + torch.from_numpy(loader.receipt.take())
        loader.close()
    return steps, sums


def joined(step):
    """Return the images, noise and labels of a step over all ranks."""
    inputs, labels = zip(*step, strict=True)
    return [torch.cat([each[name] for each in inputs]) for name in ("image", "noise")] + [torch.cat(labels)]


def assert_equal(steps, others):
    """Assert that the images, noise and labels of each step are equal over all ranks."""
    for one, other in zip(steps, others, strict=True):
        assert all(map(torch.equal, joined(one), joined(other)))


@pytest.mark.parametrize("workers, ranks", [(1, 1), (4, 1), (0, 2), (1, 4)])
def test_tensors_and_receipts_are_equal_for_all_workers_and_ranks(workers, ranks):
    expected, expected_sums = batches(Photographs())
    random.seed(workers)
    np.random.seed(workers)
    found, sums = batches(Photographs(), workers=workers, ranks=ranks)
    assert torch.equal(sums, expected_sums)
    assert_equal(expected, found)


def test_a_restart_in_the_middle_of_an_epoch_continues_with_the_same_tensors():
    whole, sums = batches(Photographs())
    rest, rest_sums = batches(Photographs(), start=3, workers=1)
    assert torch.equal(sums[3:], rest_sums)
    assert_equal(whole[3:], rest)
    noise = torch.cat([joined(step)[1] for step in whole])
    assert len(noise.unique(dim=0)) == len(noise)  # other numbers for each sample and epoch


def _loader(seed=0, size=SIZE):
    data = TensorDataset(torch.arange(size), torch.arange(size))
    return map_style_loader(data, BatchSampler(size, BATCH, seed, epochs=2), CPU)


def _train(loader, folder, state=None, last=2 * STEPS):
    """A plain loop: return the batches that it read, and the state at its end."""
    batches = []
    if state:
        loader.load_state_dict(state)
    for _ in loader.epochs_from(loader.step):
        for inputs, _ in loader:
            batches.append(inputs)
            loader.commit(loader.step, str(folder))
            if loader.step == last:
                return batches, loader.state_dict()
    return batches, loader.state_dict()


def test_the_state_of_a_loader_continues_a_plain_loop_and_its_receipt(tmp_path):
    whole, end = _train(_loader(), tmp_path / "whole")
    first, state = _train(_loader(), tmp_path / "run", last=5)
    rest, resumed_end = _train(_loader(), tmp_path / "run", state)
    assert all(map(torch.equal, first + rest, whole)) and len(first + rest) == len(whole)
    assert resumed_end == end
    receipts = [(tmp_path / name / "receipt.bin").read_bytes() for name in ("run", "whole")]
    assert receipts[0] == receipts[1]
    for other in (_loader(seed=1), _loader(size=SIZE + 1)):
        with pytest.raises(BadInput, match=r"seed|data"):
            other.load_state_dict(state)


def test_making_a_loader_does_not_change_the_generators_of_the_job():
    """The initial weights do not depend on the data set."""
    for dataset in (Photographs(), Words()):
        before = generators.snapshot()
        collate_fn = pad if isinstance(dataset, Words) else None
        map_style_loader(dataset, sampler(), CPU, collate_fn=collate_fn).example(2)
        assert generators.snapshot() == before


def _drawn(workers, rank, world_size, start=0, history=0, seed=3):
    """Return what a loop draws at the start of epochs, in steps and after epochs."""
    torch.rand(history), np.random.rand(history), [random.random() for _ in range(history)]
    part = sampler(seed).for_rank(rank, world_size)
    loader = map_style_loader(Photographs(), part, CPU, workers=workers)
    loader.lead(start)
    drawn = {}
    for epoch in loader.epochs_from(start):
        drawn["start", epoch] = torch.rand(1).item(), np.random.rand(), random.random()
        for step, _ in enumerate(loader, loader.plan.sampler.step):
            drawn["step", step] = torch.rand(1).item(), np.random.rand(), random.random()
            torch.rand(history + rank), np.random.rand(history), [random.random() for _ in range(history)]
        drawn["end", epoch] = torch.rand(1).item(), np.random.rand(), random.random()
    loader.close()
    return drawn


def test_random_numbers_of_a_loop_are_a_function_of_the_seed_the_step_and_the_rank():
    ranks = [_drawn(0, rank, 2) for rank in (0, 1)]
    runs = [*ranks, _drawn(0, 0, 2, seed=4)]
    numbers = [number for drawn in runs for three in drawn.values() for number in three]
    assert len(set(numbers)) == len(numbers)
    for start, workers, history in ((0, 1, 3), (4, 0, 7), (6, 1, 1)):
        again = _drawn(workers, 1, 2, start, history)
        assert again == {key: ranks[1][key] for key in again} and len(again) < len(ranks[1]) + (start == 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("end", [StopIteration(), SystemExit(0)])
def test_a_sample_that_ends_the_loading_is_an_error(workers, end):
    class Ends(Words):
        fingerprint = "x"  # otherwise this sample is read before

        def __getitem__(self, id):
            if id == 7:
                raise end
            return super().__getitem__(id)

    with pytest.raises(RuntimeError, match=r"sample 7 of Ends raised (StopIteration|SystemExit)"):
        list(map_style_loader(Ends(), sampler(), CPU, collate_fn=pad, workers=workers))


def test_an_engine_that_ends_early_is_an_error():
    loader = map_style_loader(Words(), sampler(), CPU, collate_fn=pad)
    loader.engine.run = lambda plan: (each for each in ())
    with pytest.raises(RuntimeError, match=r"epoch 1 .*step 0, \d+ steps .*early"):
        list(loader)


class Garbage:
    """An object in a cycle, as a pipeline of DALI is, that notes the process that deletes it."""

    def __init__(self, path):
        self.path, self.itself = path, self

    def __del__(self):
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()} ")


def test_workers_do_not_delete_the_garbage_of_their_parent(tmp_path):
    def collect(id):
        gc.collect()
        return torch.zeros(2), gc.isenabled()

    deleted = tmp_path / "deleted"
    deleted.write_text("")
    collects = []
    try:
        for change in (gc.disable, gc.enable):
            change()
            Garbage(deleted)
            loader = map_style_loader(Items(collect, 4), SequentialBatchSampler(4, 4), CPU, workers=1)
            with contextlib.closing(loader):
                collects += [batch[1].tolist() for batch in loader]
            assert gc.isenabled() == (change is gc.enable)
    finally:
        gc.enable()
    assert collects == [[True] * 4] * 2  # with and without a collector in the job
    while deleted.read_text().count(" ") < 2:  # while another thread collects, gc.collect() does nothing
        gc.collect()
    assert deleted.read_text() == f"{os.getpid()} " * 2


def test_a_sampler_of_torch_is_refused_with_what_to_use():
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * SIZE, SIZE)
    for other in (torch.utils.data.BatchSampler(weighted, BATCH, False), weighted):
        with pytest.raises(BadInput, match=r"got \w+Sampler.*use BatchSampler.*weights="):
            map_style_loader(Words(), other, CPU, collate_fn=pad)


def test_a_padded_batch_and_an_item_that_draws_only_sometimes_are_equal_on_any_number_of_ranks():
    padded = [batches(Words(), collate_fn=pad, ranks=ranks)[1] for ranks in (1, 4)]
    assert torch.equal(*padded)
    rare = Items(lambda id: (id, random.random() if id == 17 else 0.5))
    alone, sums = batches(rare)
    shared, shared_sums = batches(rare, ranks=4)
    assert torch.equal(sums, shared_sums)
    for one, other in zip(alone, shared, strict=True):
        assert torch.equal(torch.cat([t for _, t in one]), torch.cat([t for _, t in other]))


def test_rows_of_a_table_are_taken_at_once_and_are_those_of_its_items():
    table = TensorDataset(torch.randn(SIZE + 5, 3), torch.randn(SIZE + 5))
    part = Subset(Subset(table, list(range(SIZE + 4, 2, -1))), list(range(SIZE)))
    fast, sums = batches(part)
    slow, slow_sums = batches(Items(part.__getitem__))
    assert torch.equal(sums, slow_sums)
    for [(inputs, targets)], [(others, other_targets)] in zip(fast, slow, strict=True):
        assert torch.equal(inputs, others) and torch.equal(targets, other_targets)


def fingerprint(dataset):
    return map_style_loader(dataset, sampler(), CPU).receipt.fingerprint


def test_the_samples_and_targets_are_the_identity_of_the_data():
    inputs, targets = torch.randn(500, 3), torch.arange(500)
    changed = targets.clone()
    changed[123] = 0

    class Rows(Items):
        def __init__(self, inputs, targets):
            super().__init__(lambda id: (inputs[id] + torch.rand(3), targets[id]), len(inputs))
            self.targets = targets

    class Named(Rows):
        fingerprint = "version 1"

    for make in (TensorDataset, Rows, lambda *data: Subset(Rows(*data), range(400))):
        made = [fingerprint(make(inputs, each)) for each in (targets, targets.clone(), changed)]
        assert made[0] == made[1] != made[2]
    assert fingerprint(Named(inputs, targets)) == fingerprint(Named(inputs, changed))


@pytest.mark.parametrize("count", [1, 13])
def test_an_evaluation_takes_each_sample_once_on_every_rank(count):
    dataset, seen = TensorDataset(torch.arange(count), torch.arange(count)), []
    for order in (SequentialBatchSampler(count, 3), WholeBatchSampler(count, 8, 0, 1)):
        for rank in range(4):
            loader = map_style_loader(dataset, order.for_rank(rank, 4), CPU)
            seen += [(type(order), id) for inputs, _ in loader for id in inputs.tolist()]
    assert len(seen) == 2 * count == len(set(seen))


@pytest.mark.parametrize("classes, expected", [(["cat", "dog"], ("cat", "dog")), (2, ())])
def test_torchvisions_classes_are_the_names(classes, expected):
    dataset = Words()
    dataset.classes = classes
    for data in (dataset, Subset(dataset, range(SIZE))):
        assert map_style_loader(data, sampler(), CPU).plan.index.class_names == expected


def test_what_cannot_be_read_by_number_is_refused_with_the_way_out(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(9))

    for call in (
        lambda: map_style_loader(Stream(), sampler(), CPU),
        lambda: log_of(tmp_path).print_data(Stream(), Words()),  # a job calls it first
    ):
        with pytest.raises(BadInput, match=r"Stream is an IterableDataset.*Write __getitem__ and __len__"):
            call()
    with pytest.raises(BadInput, match="needs __len__ and __getitem__"):
        map_style_loader(object(), sampler(), CPU)
    triples = Items(lambda id: (id, id, id))
    for workers in (0, 1):
        with pytest.raises(BadInput, match=r"list of 3.*collate_fn") as refused:
            next(iter(map_style_loader(triples, sampler(), CPU, workers=workers)))
        assert "Traceback" not in str(refused.value)
    assert draw_seeds(None, np.arange(5), 1, 1).seed.min() >= 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_shards_have_random_numbers_of_their_own_and_the_receipt_is_that_of_whole_batches(world_size):
    """4 shards a step: a process with 2 of them draws what the process with all 4 draws."""
    data = TensorDataset(torch.arange(SIZE), torch.arange(SIZE))
    drawn, sums = {}, []
    for rank in range(world_size):
        sampler = BatchSampler(SIZE, BATCH, 7, 1).for_rank(rank, world_size).split(4)
        loader = map_style_loader(data, sampler, CPU)
        loader.lead(0)
        for place, (inputs, _) in enumerate(loader):
            step, shard = divmod(place, 4 // world_size)
            drawn[step, rank * 4 // world_size + shard] = (inputs.tolist(), torch.rand(1).item())
        assert loader.step == len(loader) == 4
        sums.append(torch.from_numpy(loader.receipt.take()))
    whole = map_style_loader(data, BatchSampler(SIZE, BATCH, 7, 1), CPU)
    for step, (inputs, _) in enumerate(whole):
        assert [each for shard in range(4) for each in drawn[step, shard][0]] == inputs.tolist()
        for shard in range(4):
            generators.seed_all(generators.derive_seed(7, shard, step))
            assert drawn[step, shard][1] == torch.rand(1).item()
    assert torch.equal(sum(sums), torch.from_numpy(whole.receipt.take()))
