"""The batches of a plan: its views and sizes, and the batches that removed samples leave."""

from typing import NamedTuple

import numpy as np
import pytest

from bootfile.sampling.plan import Plan
from bootfile.sampling.removal import Removal
from bootfile.sampling.sampler import BatchSampler


class Index:
    fingerprint = "f"

    def __init__(self, views=1):
        self.labels = np.tile(np.arange(40) % 7, views)

    def __len__(self):
        return 40


class Numbers(NamedTuple):
    number: np.ndarray


def numbers(index, ids, seed, epoch):
    return Numbers(ids % len(index) * 1000 + epoch)


def test_each_view_of_a_drawn_sample_has_the_epoch_of_its_draw():
    sampler = BatchSampler(40, 8, 3, epochs=1, weights=1 + np.arange(40))
    batches = list(Plan(Index(2), sampler, numbers, views=2))
    assert len(batches) == 5
    for ids, _, crops, epochs, _ in batches:
        assert len(ids) == len(epochs) == 16 and np.array_equal(epochs[:8], epochs[8:])
        assert np.array_equal(ids[:8] + 40, ids[8:]) and np.array_equal(crops.number[:8], crops.number[8:])


@pytest.mark.parametrize(("steps", "sizes"), [(10, [10, 20]), (11, [10, 20, 30]), (15, [10, 20, 30])])
def test_sizes_are_also_those_of_an_epoch_that_ends_early(steps, sizes):
    plan = Plan(Index(), BatchSampler(40, 8, 3, max_steps=steps), size=lambda epoch: 10 * epoch)
    assert plan.sizes == sizes


def test_a_batch_of_which_all_samples_are_removed_keeps_them():
    sampler = BatchSampler(40, 8, 3, epochs=1)
    batches = [sampler.batch(step) for step in range(5)]
    plan = Plan(Index(), sampler, numbers)
    plan.removal = Removal(np.sort(np.concatenate([batches[1], batches[3][:3]])))
    rest = [ids.tolist() for ids, *_ in plan]
    expected = [*batches[:3], batches[3][3:], batches[4]]
    assert rest == [ids.tolist() for ids in expected]
    assert [plan.removal.takes_all(ids) for ids in batches] == [False, True, False, False, False]


def test_removed_samples_are_counted_in_the_part_of_the_step_that_had_them():
    sampler = BatchSampler(40, 8, 3, epochs=1, rank=1, world_size=2)
    ids = sampler.for_rank(0, 1).batch(1)
    for place in range(8):
        removal = Removal(ids[place : place + 1])
        assert removal.count(sampler, 2, 4) == tuple(2 - (place // 2 == part) for part in range(4))
        assert removal.count(sampler, 2) == (7,) and removal.count(sampler, 3) == (8,)
