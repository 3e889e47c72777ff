"""Random generators that an object holds are found wherever they are: otherwise a restart is not exact."""

import numpy as np

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


def test_in_a_slot():
    assert [each.path for each in find_generators(Slots(), "data")] == ["data.draw"]


def test_in_a_closure_with_an_empty_cell():
    assert [each.path for each in find_generators(closure(), "data")] == ["data.draw"]
