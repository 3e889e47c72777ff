"""Random generators that an object holds are found wherever they are: otherwise a restart is not exact."""

import numpy as np
import pytest

from bootfile.sampling.generators import find_generators


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
