"""Random generators that an object holds are found wherever they are: otherwise a restart is not exact."""

import numpy as np
import pytest
import torch

from bootfile.sampling.generators import find_generators, seed_all, seed_with


class Slots:
    __slots__ = ("draw",)

    def __init__(self):
        self.draw = np.random.default_rng()


def closure():
    draw = np.random.default_rng()

    def transform(item):
        return draw.random() + later(item)

    if draw is None:
        later = transform  # so its cell stays empty
    return transform


FIRST, SECOND = np.random.default_rng(), np.random.default_rng()


class Items:
    """A method after __getitem__ draws from another generator than that does."""

    def __init__(self):
        self.own = np.random.default_rng()

    def __getitem__(self, id):
        return self.load() + FIRST.random()

    def load(self):
        return SECOND.random()


def test_the_order_of_generators_stays_because_it_decides_how_each_is_seeded():
    assert [each.path for each in find_generators(Items())] == ["own", "FIRST", "SECOND"]


@pytest.mark.parametrize("owner", [Slots(), closure()], ids=["slot", "closure with an empty cell"])
def test_a_generator_is_found(owner):
    assert [each.path for each in find_generators(owner, "data")] == ["data.draw"]


def test_a_generator_that_a_loader_holds_draws_other_numbers_than_the_global_one():
    held = [torch.Generator(), torch.Generator()]
    seed_with(7, find_generators(held))
    assert torch.initial_seed() == 7
    assert sorted(each.initial_seed() for each in held) == [8, 9]


def test_each_gpu_of_a_process_has_a_seed_of_its_own(monkeypatch):
    devices = [torch.Generator() for _ in range(3)]
    monkeypatch.setattr(torch.cuda, "default_generators", devices)
    seed_all(2**64 - 1, torch.device("cuda", 1))
    assert [each.initial_seed() for each in devices] == [2**64 - 2, 2**64 - 1, 0]
