from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from torchvision.transforms.v2 import RandomResizedCrop

from datasets.loaders.engines.memory import Windows
from datasets.sampling.augment import (  # fmt: skip
    alternating_flip,
    center_crop,
    center_square,
    crop_flip,
    random_resized_crop,
    square_crop,
)

pytestmark = pytest.mark.rounding

PADDED = SimpleNamespace(padding=4, flip=True)


class Images:
    """An index of images: widths and heights by id."""

    def __init__(self, widths, heights):
        self.widths, self.heights = np.asarray(widths), np.asarray(heights)

    def __len__(self):
        return len(self.widths)


def test_windows_are_uniform_and_flips_are_fair_and_independent():
    top, left, flip = crop_flip(PADDED, np.arange(162_000), 0, 0)
    counts = np.zeros((9, 9, 2))
    np.add.at(counts, (top, left, flip.astype(int)), 1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 162 + 5 * np.sqrt(2 * 162)


def test_alternating_flip_shows_both_mirror_images_in_two_epochs():
    ids = np.arange(10_000)
    flips = [alternating_flip(PADDED, ids, 7, epoch).flip for epoch in range(1, 5)]
    assert abs(flips[0].mean() - 0.5) < 0.02
    assert np.array_equal(flips[0], ~flips[1]) and np.array_equal(flips[0], flips[2])
    assert not np.array_equal(flips[0], alternating_flip(PADDED, ids, 8, 1).flip)
    some = alternating_flip(PADDED, ids[::-1][:10], 7, 3)
    windows = crop_flip(PADDED, ids, 7, 3)
    assert np.array_equal(some.flip, flips[2][::-1][:10]) and np.array_equal(some.top, windows.top[::-1][:10])
    assert not alternating_flip(SimpleNamespace(padding=4, flip=False), ids, 7, 1).flip.any()


@pytest.mark.parametrize("reflect", [False, True])
def test_windows_are_cut_as_torchvision_cuts_them(reflect):
    from torchvision.transforms.functional import crop, hflip, pad

    images = torch.randint(256, (200, 3, 12, 10), dtype=torch.uint8)
    parameters = crop_flip(SimpleNamespace(padding=3, flip=True), np.arange(200), 1, 2)
    cut = torch.from_numpy(Windows(images, 3, reflect)(np.arange(200), parameters)).permute(0, 3, 1, 2)
    mode = "reflect" if reflect else "constant"
    assert cut.dtype == torch.uint8 and cut.shape == images.shape
    for image, result, top, left, flip in zip(images, cut, *parameters, strict=True):
        expected = crop(pad(image, [3, 3], padding_mode=mode), int(top), int(left), 12, 10)
        assert torch.equal(result, hflip(expected) if flip else expected)


# random-resized crops


def _boxes(width, height, count=4000):
    return random_resized_crop(Images(np.full(count, width), np.full(count, height)), np.arange(count), 3, 1)


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (100, 40), (64, 300), (3, 3), (1000, 10)])
def test_boxes_are_distributed_as_torchvision_s(size):
    """A two-sample Kolmogorov-Smirnov test of every figure finds the same distribution."""
    width, height = size
    ours = _boxes(width, height)
    image = torch.empty(3, height, width)
    torch.manual_seed(0)
    theirs = np.array(
        [RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(len(ours.top))]
    ).T
    for own, other in zip((ours.top, ours.left, ours.height, ours.width), theirs, strict=True):
        assert scipy.stats.ks_2samp(own, other).pvalue > 1e-4
    assert (ours.top >= 0).all() and (ours.top + ours.height <= height).all()
    assert (ours.left >= 0).all() and (ours.left + ours.width <= width).all()
    assert 0.45 < ours.flip.mean() < 0.55


def test_the_largest_box_that_is_allowed_where_no_attempt_fits():
    crop = _boxes(1000, 10, 5)
    found = {tuple(map(int, row)) for row in zip(*crop[:4], strict=True)}
    assert (0, 493, 10, 13) in found, "torchvision's fallback: the whole height, centred"


def test_a_box_depends_on_seed_epoch_id_and_size_only():
    ids, index = np.array([0, 1, 2]), Images((400, 500, 640), (300, 375, 480))
    together = random_resized_crop(index, ids, 1, 2)
    for place in range(3):
        one = slice(place, place + 1)
        alone = random_resized_crop(index, ids[one], 1, 2)
        assert all(np.array_equal(a, b[one]) for a, b in zip(alone, together, strict=True))
    for seed, epoch in ((2, 2), (1, 3)):
        other = random_resized_crop(index, ids, seed, epoch)
        assert not np.array_equal(other.width, together.width)


def test_centre_crops_show_what_resize_and_centre_crop_show():
    crop = center_crop(Images([500, 375, 256, 1, 99], [375, 500, 256, 300, 99]), np.arange(5), 0, 1)
    assert crop.width.tolist() == crop.height.tolist() == [328, 328, 224, 1, 87]
    assert crop.left.tolist() == [86, 23, 16, 0, 6] and crop.top.tolist() == [23, 86, 16, 149, 6]
    assert not crop.flip.any()


# squares


def test_squares_are_uniform_and_their_flips_fair_and_independent():
    ids, index = np.arange(90_000), Images(np.full(90_000, 12), np.full(90_000, 10))
    top, left, height, width, flip = square_crop(index, ids, 1, 2, side=8)
    assert set(height.tolist()) == set(width.tolist()) == {8}
    counts = np.zeros((3, 5, 4))
    np.add.at(counts, (top, left, flip), 1)
    assert ((counts - 1500) ** 2 / 1500).sum() < 60 + 5 * np.sqrt(2 * 60)
    assert not np.array_equal(top, square_crop(index, ids, 1, 3, side=8).top)
    part = square_crop(index, ids[500:510], 1, 2, side=8)
    assert all(
        np.array_equal(some, column[500:510])
        for some, column in zip(part, (top, left, height, width, flip), strict=True)
    )


def test_the_square_in_the_middle():
    middle = center_square(Images([12, 9], [10, 8]), np.arange(2), 0, 1, side=8)
    assert [column.tolist() for column in middle] == [[1, 0], [2, 0], [8, 8], [8, 8], [0, 0]]
