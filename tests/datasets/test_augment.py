import numpy as np
import torch

from datasets.augment import CropFlip, apply_crop_flip, crop_flip


def test_parameters_depend_on_the_sample_not_on_the_batch():
    whole = crop_flip(7, 3, np.arange(1000), padding=4, flip=True)
    part = crop_flip(7, 3, np.arange(1000)[::-1][:10], padding=4, flip=True)
    for all_rows, some in zip(whole, part, strict=True):
        assert np.array_equal(all_rows[::-1][:10], some)
    assert not np.array_equal(whole.top, crop_flip(7, 4, np.arange(1000), 4, True).top)
    assert not np.array_equal(whole.top, crop_flip(8, 3, np.arange(1000), 4, True).top)


def test_windows_are_uniform_and_flips_are_fair_and_independent():
    top, left, flip = crop_flip(0, 0, np.arange(162_000), padding=4, flip=True)
    counts = np.zeros((9, 9, 2))
    np.add.at(counts, (top, left, flip.astype(int)), 1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 162 + 5 * np.sqrt(2 * 162)


def test_no_flip_and_no_padding_leave_the_image():
    parameters = crop_flip(0, 0, np.arange(100), padding=0, flip=False)
    images = torch.randint(256, (100, 3, 9, 7), dtype=torch.uint8)
    assert torch.equal(apply_crop_flip(images, parameters, padding=0), images)


def test_windows_are_cut_as_torchvision_cuts_them():
    from torchvision.transforms.functional import crop, hflip, pad

    images = torch.randint(256, (200, 3, 12, 10), dtype=torch.uint8)
    parameters = crop_flip(1, 2, np.arange(200), padding=3, flip=True)
    cut = apply_crop_flip(images, parameters, padding=3)
    assert cut.dtype == torch.uint8 and cut.shape == images.shape
    for image, result, top, left, flip in zip(images, cut, *parameters, strict=True):
        expected = crop(pad(image, [3, 3]), int(top), int(left), 12, 10)
        assert torch.equal(result, hflip(expected) if flip else expected)


def test_a_window_by_hand():
    image = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3)
    parameters = CropFlip(np.array([0]), np.array([2]), np.array([True]))
    assert apply_crop_flip(image, parameters, padding=1)[0, 0].tolist() == [[0, 0, 0], [0, 3, 2], [0, 6, 5]]
