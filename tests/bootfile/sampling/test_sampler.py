import functools
import itertools
import tracemalloc

import numpy as np
import pytest
import torch

from bootfile.ground.errors import BadInput
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler, SequentialBatchSampler, WholeBatchSampler, permute
from datasets.sampling.augment import random_resized_crop
from datasets.sampling.effects import Effects, draw_effects


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 97, 100, 1438, 7919, 65_536, 10**9, 10**9 + 7, 2**62])
def test_the_inverse_of_a_permutation(size):
    """Also of ids that were reached through values above the size."""
    positions = np.arange(size) if size < 10**5 else np.random.default_rng(0).integers(0, size, 5000)
    for seed, epoch in ((0, 1), (2**63, 7), (2**64 - 1, 2**32 - 1)):
        ids = permute(positions, size, seed, epoch)
        assert np.array_equal(permute(ids, size, seed, epoch, inverse=True), positions)
    epochs = np.arange(1, 6)
    ids = np.array([permute([size - 1], size, 3, epoch)[0] for epoch in epochs])
    assert permute(ids, size, 3, epochs, inverse=True).tolist() == [size - 1] * 5


UNSHUFFLED = functools.partial(WholeBatchSampler, shuffle=False)


@pytest.mark.parametrize("kind", [BatchSampler, WholeBatchSampler, UNSHUFFLED])
def test_a_sampler_finds_the_step_of_a_sample_in_each_epoch(kind):
    sampler, epochs = kind(103, 10, seed=9), np.arange(1, 6)
    batches = [sampler.batch(step) for step in range(5 * len(sampler))]
    for id in range(103):
        for epoch, step in zip(epochs.tolist(), sampler.find(id, epochs).tolist(), strict=True):
            steps = range((epoch - 1) * len(sampler), epoch * len(sampler))
            assert [each for each in steps if id in batches[each]] == [step] * (step >= 0)
    for id in (-1, 103):
        with pytest.raises(BadInput, match=rf"sample {id} is not in 0\.\.102"):
            sampler.find(id, epochs)


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("size, batch", [(1438, 128), (50_000, 128), (100, 8)])
def test_global_batches_are_the_same_at_any_world_size(size, batch, world_size):
    alone = BatchSampler(size, batch, seed=5)
    ranks = [
        BatchSampler(size, batch, seed=5, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    for epoch in (1, 2):
        for order in (alone, *ranks):
            order.seek((epoch - 1) * len(order))
        for whole, *parts in zip(alone, *ranks, strict=True):
            assert np.concatenate(parts).tolist() == whole.tolist()


@pytest.mark.parametrize("kind", [BatchSampler, WholeBatchSampler])
def test_weights_draw_with_replacement_by_a_function_of_the_position(kind):
    size, batch, weights = 103, 8, np.arange(103) % 4  # 26 samples have the weight 0
    alone = kind(size, batch, seed=5, epochs=2, weights=weights)
    ranks = [
        kind(size, batch, seed=5, epochs=2, weights=weights, rank=rank, world_size=4) for rank in range(4)
    ]
    whole = [ids for _ in alone.epochs_from(0) for ids in alone]
    shared = [np.concatenate(parts) for epochs in zip(*(each.epochs_from(0) for each in ranks), strict=True)
              for parts in zip(*ranks, strict=True) if epochs]  # fmt: skip
    rest = [ids for _ in alone.epochs_from(7) for ids in alone]
    assert [ids.tolist() for ids in whole] == [ids.tolist() for ids in shared]
    assert [ids.tolist() for ids in whole[7:]] == [ids.tolist() for ids in rest]
    assert [alone.batch(step).tolist() for step in range(len(whole))] == [ids.tolist() for ids in whole]
    drawn = np.concatenate(whole)
    assert weights[drawn].min() > 0 and len(np.unique(drawn)) < len(drawn)
    with pytest.raises(BadInput, match="weights"):
        alone.find(1, np.arange(1, 3))


def test_the_share_of_a_sample_is_that_of_its_weight():
    weights = np.array([1.0, 0, 2, 5])
    sampler = BatchSampler(400, 400, seed=1, max_steps=50, weights=np.tile(weights, 100))
    counts = sum(np.bincount(ids % 4, minlength=4) for _ in sampler.epochs_from(0) for ids in sampler)
    expected = 20_000 * weights / weights.sum()
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected.max()) and counts[1] == 0


def test_the_repeats_of_a_sample_in_an_epoch_have_other_random_numbers():
    """The batch's `epoch` distinguishes them; without weights it is the number of the epoch."""

    class Index(list):
        labels, fingerprint = np.zeros(5, int), "data"
        widths, heights = np.full(5, 640), np.full(5, 480)

    index = Index(range(5))
    sampler = BatchSampler(5, 5, seed=1, max_steps=40, weights=[0, 0, 1, 0, 0])
    plan = Plan(index, sampler, random_resized_crop)
    batches = [batch for _ in sampler.epochs_from(0) for batch in plan]
    boxes = {tuple(row) for batch in batches for row in np.stack(batch.crops, 1).tolist()}
    assert {id for batch in batches for id in batch.ids.tolist()} == {2}
    assert len(boxes) > 190  # 200 draws; two may have one box
    drawn = [draw_effects(Effects(True), batch.ids, 1, batch.epoch, 32).strength for batch in batches[:3]]
    assert all(len(np.unique(each)) > 1 for each in drawn)
    assert plan.fingerprint.startswith("data+") and plan.fingerprint != Plan(
        index, BatchSampler(5, 5, seed=1, weights=[0, 0, 1, 1, 0])
    ).fingerprint  # fmt: skip
    plain = Plan(index, BatchSampler(5, 5, seed=1), random_resized_crop)
    assert [batch.epoch for batch in plain] == [1] and plain.fingerprint == "data"


@pytest.mark.parametrize("weights, named", [
    ([1e308] * 3, "sum inf"), (torch.ones(3, requires_grad=True), "numbers"), (["a"] * 3, "numbers"),
    ([1, 2], r"\[2\].*3 samples"), ([1, -2, 1], "sample 1 is -2"), ([1, 1, np.nan], "sample 2 is nan"),
    ([0, 0, 0], "sum 0"),
])  # fmt: skip
def test_weights_that_cannot_be_drawn_are_refused(weights, named):
    with pytest.raises(BadInput, match=named):
        BatchSampler(3, 1, seed=0, weights=weights)


@pytest.mark.parametrize("kind, length", [(BatchSampler, 3), (WholeBatchSampler, 4)])
def test_a_training_continues_after_any_step(kind, length):
    """Epochs are numbered from 1. A complete epoch is repeated with no batch left."""
    sampler = kind(34, 10, seed=4, epochs=3, max_steps=3 * length - 1)
    assert (len(sampler), sampler.total_steps) == (length, 3 * length - 1)
    whole = [(epoch, ids.tolist()) for epoch in sampler.epochs_from(0) for ids in sampler]
    assert [epoch for epoch, _ in whole] == [1] * length + [2] * length + [3] * (length - 1)
    for step in range(sampler.total_steps + 1):
        first = max(1, -(-step // length))
        rest = [(epoch, [ids.tolist() for ids in sampler]) for epoch in sampler.epochs_from(step)]
        assert [epoch for epoch, _ in rest] == list(range(first, 4))
        assert [(epoch, ids) for epoch, batches in rest for ids in batches] == whole[step:]
        sampler.seek(step)
        assert sampler.epoch == step // length + 1
        assert [ids.tolist() for ids in sampler] == [
            ids for epoch, ids in whole[step:] if epoch == sampler.epoch
        ]
    for step in (-1, sampler.total_steps + 1):
        with pytest.raises(BadInput, match=f"step {step} is not in 0..{sampler.total_steps}"):
            sampler.seek(step)


@pytest.mark.parametrize("part", [1, 2, 3, 4, 7, 100])
def test_parts_of_an_epoch_have_the_samples_of_the_whole_epoch(part):
    """An epoch has 5 steps; a part ends after each multiple of its length, counted over all epochs."""
    sampler = BatchSampler(23, 4, seed=4, epochs=3, max_steps=14)
    whole = [ids.tolist() for _ in sampler.epochs_from(0) for ids in sampler]
    sampler.part = part
    ends = sorted({*range(part, 15, part), 5, 10, 14})
    for step in range(15):
        seen, stops = [], []
        for epoch in sampler.epochs_from(step):
            batches = [ids.tolist() for ids in sampler]
            assert sampler.remaining == len(batches)
            seen += batches
            stops.append(step + len(seen))
            assert epoch == max(1, -(-stops[-1] // 5))
        assert seen == whole[step:] and stops == [end for end in ends if end >= step]


@pytest.mark.parametrize("kind, length", [(BatchSampler, 3), (WholeBatchSampler, 4)])
def test_an_epoch_can_end_early(kind, length):
    """A cut epoch has the first steps of the whole one, and the next one begins after it."""
    whole, cut, long = (kind(34, 10, 4, epochs=3, epoch_steps=steps) for steps in (None, 2, 9))
    assert [len(each) for each in (whole, cut, long)] == [length, 2, length]
    assert cut.total_steps == 6 and kind(34, 10, 4, 3, 5, 2).total_steps == 5
    batches = [(epoch, ids.tolist()) for epoch in cut.epochs_from(0) for ids in cut]
    first = [whole.batch(epoch * length + step).tolist() for epoch in range(3) for step in range(2)]
    assert batches == list(zip([1, 1, 2, 2, 3, 3], first, strict=True))
    for step in range(7):
        rest = [(epoch, ids.tolist()) for epoch in cut.epochs_from(step) for ids in cut]
        assert rest == batches[step:]
    third = int(whole.batch(2)[0])  # in no step of the first cut epoch
    assert cut.find(third, [1]).tolist() == [-1] and whole.find(third, [1]).tolist() == [2]


def test_limits_of_a_training():
    assert BatchSampler(34, 10, 0).total_steps is None
    assert BatchSampler(34, 10, 0, max_steps=7).total_steps == 7
    assert BatchSampler(34, 10, 0, epochs=2, max_steps=7).total_steps == 6
    assert list(itertools.islice(BatchSampler(34, 10, 0).epochs_from(5), 3)) == [2, 3, 4]


@pytest.mark.parametrize("size", [7, 64, 1000])
def test_positions_are_uniform(size):
    """Over many epochs every sample has every position equally often (positions in up to 10 groups)."""
    groups, counts = min(10, size), np.zeros((size, min(10, size)))
    orders = permute(np.tile(np.arange(size), 1000), size, 11, np.arange(1000).repeat(size))
    place = np.arange(size) * groups // size
    for order in orders.reshape(1000, size):
        counts[order, place] += 1
    cells, expected = size * groups, np.bincount(place, minlength=groups) * 1000 / size
    bound = cells + 5 * np.sqrt(2 * cells)  # five standard deviations above the mean
    assert ((counts - expected) ** 2 / expected).sum() < bound


@pytest.mark.parametrize("other", [dict(seed=0, epoch=2), dict(seed=1, epoch=1), dict(seed=2**32, epoch=1)])
def test_epochs_and_seeds_are_independent(other):
    """Samples keep a position or a distance as often as in two random permutations."""
    size = 100_000
    first, second = permute(np.arange(size), size, 0, 1), permute(np.arange(size), size, **other)
    assert (first == second).sum() < 10  # Poisson with mean 1
    assert ((first[1:] - first[:-1]) == (second[1:] - second[:-1])).sum() < 12
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(size)
    assert abs(np.corrcoef(first, np.arange(size))[0, 1]) < 5 / np.sqrt(size)
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 5 / np.sqrt(size)


def test_a_billion_samples_cost_the_memory_of_a_batch():
    order = BatchSampler(10**9, 256, seed=0)
    tracemalloc.start()
    ids = order.batch(3_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(ids.tolist())) == 256 and ids.min() >= 0 and ids.max() < 10**9
    assert peak < 1_000_000


@pytest.mark.parametrize("size", [1, 2, 3, 7, 359, 1000])
def test_sequential_visits_each_sample_once(size):
    for ranks in (1, 2, 3, 4, 7):
        parts = [SequentialBatchSampler(size, 100).for_rank(rank, ranks) for rank in range(ranks)]
        batches = [list(part) for part in parts]
        assert [len(part) for part in parts] == [len(part) for part in batches]
        assert np.concatenate([*itertools.chain(*batches)]).tolist() == list(range(size))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 8])
def test_shards_are_the_same_on_any_number_of_processes(ranks):
    """Each global batch of 24 in 8 shards, and an evaluation of 100 samples in 8 parts."""
    split = [BatchSampler(100, 24, 3, epochs=2).for_rank(rank, ranks).split(8) for rank in range(ranks)]
    assert [part.first_shard for part in split] == [8 * rank // ranks for rank in range(ranks)]
    steps = [np.array_split(list(part), 4) for part in split]  # each rank's shards in the 4 steps
    batches = [np.concatenate([own[step] for own in steps]) for step in range(4)]
    assert all(batch.shape == (8, 3) for batch in batches)
    whole = BatchSampler(100, 24, 3)
    assert all(np.array_equal(batches[step].reshape(-1), whole.batch(step)) for step in range(4))
    parts = [SequentialBatchSampler(100, 5).for_rank(rank, ranks).split(8) for rank in range(ranks)]
    assert [len(list(part)) for part in parts] == list(map(len, parts))
    alone = [SequentialBatchSampler(100, 5).for_rank(rank, 8) for rank in range(8)]
    assert [part.first_shard for part in alone] == list(range(8))
    assert [ids.tolist() for part in parts for ids in part] == [
        ids.tolist() for part in alone for ids in part
    ]


def test_the_largest_batch_of_a_rank():
    largest = BatchSampler(100, 24, 3).split(8)
    assert largest.largest == 3 and largest.batch(2).size == 24 and largest.for_rank(0, 2).largest == 12
    with pytest.raises(BadInput, match="24 is not divisible by 5 processes"):
        BatchSampler(100, 24, 3).for_rank(0, 5).largest  # noqa: B018


@pytest.mark.parametrize("kind", [BatchSampler, WholeBatchSampler])
def test_a_batch_without_samples_is_refused(kind):
    for batch, cut in ((0, None), (-4, None), (4, -1)):
        with pytest.raises(BadInput, match=f"{batch if cut is None else cut}: expected at least 1"):
            kind(100, batch, 3, epoch_steps=cut)


@pytest.mark.parametrize("batch", [0, -4])
def test_an_evaluation_without_samples_is_refused(batch):
    with pytest.raises(BadInput, match=f"{batch}: expected at least 1"):
        SequentialBatchSampler(100, batch)


def test_a_batch_that_is_not_divisible_into_shards_is_refused():
    with pytest.raises(BadInput, match="24 is not divisible by 16 shards"):
        BatchSampler(100, 24, 3).for_rank(1, 2).split(16)
    with pytest.raises(BadInput, match="use a BatchSampler"):
        WholeBatchSampler(100, 24, 3).split(2)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("size, batch", [(1, 6), (19, 6), (24, 6), (26, 12), (10_007, 6)])
def test_whole_order_visits_each_sample_once(size, batch, world_size, shuffle):
    alone = WholeBatchSampler(size, batch, 5, shuffle=shuffle)
    ranks = [
        WholeBatchSampler(size, batch, 5, rank=rank, world_size=world_size, shuffle=shuffle)
        for rank in range(world_size)
    ]
    epochs = []
    for epoch in (1, 2):
        for order in (alone, *ranks):
            order.seek((epoch - 1) * len(order))
        batches = [np.concatenate(parts).tolist() for parts in zip(*ranks, strict=True)]
        assert batches == [each.tolist() for each in alone], "the k-th batch is the same at any world size"
        assert [len(each) for each in batches[:-1]] == [batch] * (len(alone) - 1)
        for parts in zip(*ranks, strict=True):
            lengths = [len(part) for part in parts]
            assert sorted(lengths, reverse=True) == lengths and lengths[0] - lengths[-1] <= 1
            assert lengths[0] <= ranks[0].largest
        epochs.append([sample for each in batches for sample in each])
        assert sorted(epochs[-1]) == list(range(size))
    assert size == 1 or (epochs[0] == epochs[1]) == (epochs[0] == sorted(epochs[0])) == (not shuffle)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(size=100, global_batch=128), r"batch size 128 .*\(100 samples\)"),
        (dict(size=1000, global_batch=100, world_size=3), "by 3 processes; expected 99 or 102"),
        (dict(size=1000, global_batch=100, rank=2, world_size=2), r"rank 2 is not in 0\.\.1"),
        (dict(size=1000, global_batch=100, seed=-1), "seed -1"),
    ],
)
def test_bad_numbers_are_named(arguments, message):
    with pytest.raises(BadInput, match=message):
        BatchSampler(**{"seed": 0} | arguments)
