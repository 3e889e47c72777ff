"""The class of guides/own_data/masks.py reads masks of numbers and of colours, and crops both in one way."""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from tests.conftest import ROOT

SCRIPT = (ROOT / "guides" / "own_data" / "masks.py").read_text(encoding="utf-8")
CLASS = re.search(r"^class Pairs\(.*?\n(?=\n\n)", SCRIPT, re.MULTILINE | re.DOTALL)[0]
COLOURS = [(0, 0, 0), (128, 0, 0), (0, 128, 0)]
PALETTE = np.array([*COLOURS, *[(9, 9, 9)] * 253], np.uint8)


def write_mask(path, label, mode):
    mask = Image.fromarray(PALETTE[label] if mode == "colours" else label)
    if mode == "palette":
        mask.putpalette(PALETTE.tobytes())
    mask.save(path)


def test_the_class_has_at_most_12_lines():
    assert 5 < len(list(filter(None, CLASS.splitlines()))) <= 12


@pytest.mark.parametrize("mode", ["numbers", "palette", "colours"])
def test_masks_become_class_numbers_and_get_the_crop_of_their_image(mode, tmp_path):
    """The grey of an image is 60 times the class of a pixel. A part has no class."""
    unknown = 255 if mode == "colours" else 7
    labels = np.random.default_rng(0).integers(0, 3, (2, 6, 8), dtype=np.uint8)
    labels[1, 0, 0] = unknown
    labels = labels.repeat(8, 1).repeat(8, 2)
    paths = []
    for number, label in enumerate(labels):
        paths.insert(0, str(tmp_path / f"{number}_mask.png"))
        write_mask(paths[0], label, mode)
        Image.fromarray(np.where(label < 3, label, 0) * 60).save(tmp_path / f"{number}.jpg", quality=100)

    names = {}
    exec(SCRIPT, names)
    colours = COLOURS if mode == "colours" else ()
    pairs = names["Pairs"](paths, v2.RandomCrop(32), colours)
    assert len(pairs) == 2
    for number in range(2):
        image, mask = pairs[number]
        assert (image.shape, image.dtype) == ((3, 32, 32), torch.float32)
        assert (mask.shape, mask.dtype) == ((32, 32), torch.int64)
        assert (image[0] * 255 - mask * 60)[mask < 3].abs().max() < 30
    whole = names["Pairs"](paths, v2.CenterCrop((48, 64)), colours)
    assert all(torch.equal(whole[number][1], torch.from_numpy(labels[number]).long()) for number in range(2))


def test_the_metric_is_the_mean_of_the_classes_that_occur():
    names = {}
    exec(SCRIPT, names)
    metric = names["MeanIoU"](3)  # no pixel has class 2
    logits = torch.nn.functional.one_hot(torch.tensor([[[0, 1], [1, 1]]]), 3).movedim(-1, 1).float()
    sums = metric.sums(logits, torch.tensor([[[0, 0], [1, 255]]]))
    assert metric.value(sums) == pytest.approx(0.5)  # 1 / 2 of class 0, 1 / 2 of class 1
