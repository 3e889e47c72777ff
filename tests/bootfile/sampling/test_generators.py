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


@pytest.mark.parametrize("owner", [Slots(), closure()], ids=["slot", "closure with an empty cell"])
def test_a_generator_is_found(owner):
    assert [each.path for each in find_generators(owner, "data")] == ["data.draw"]
