"""Boxes are resized as Pillow does it. The image does not change, and read-only memory gives no warnings."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from datasets.folders.resize import fit, resized
from tests.conftest import ROOT

MODES = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@pytest.fixture
def image():
    pixels = np.random.default_rng(3).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    pixels.flags.writeable = False
    return pixels


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "box", [(slice(None), slice(None)), (slice(5, 80), slice(20, 111)), (slice(3, 4), slice(9))]
)
def test_resized_is_pillow(image, mode, box):
    for height, width in ((40, 30), (200, 100), (1, 1)):
        small = resized(image[box], height, width, mode)
        expected = np.asarray(Image.fromarray(image[box]).resize((width, height), MODES[mode]))
        assert small.flags.c_contiguous and small.shape == (height, width, 3)
        assert np.abs(small.astype(int) - expected).max() <= (1 if mode == "bilinear" else 2)  # noise


@pytest.mark.parametrize(("flip", "turned"), [(1, np.s_[:, ::-1]), (2, np.s_[::-1]), (3, np.s_[::-1, ::-1])])
@pytest.mark.parametrize("side", [64, 32])  # enlarged, and reduced with antialiasing
def test_a_mirrored_box_is_the_mirror_of_the_box(image, flip, turned, side):
    found = [np.zeros((side, side, 3), np.uint8) for _ in range(2)]
    for out, mirror in zip(found, (0, flip), strict=True):
        fit(image[10:60, 20:65], mirror, out)
    assert np.array_equal(found[0][turned], found[1])


@pytest.mark.thorough
def test_read_only_memory_is_no_reason_to_warn():
    code = (
        "import numpy as np; from datasets.folders.resize import resized\n"
        "print(resized(np.frombuffer(bytes(300), np.uint8).reshape(10, 10, 3), 5, 5).sum())"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr
