"""The box of a JPEG that is decoded alone has the pixels of the whole image."""

import importlib.util
import io
import sys

import numpy as np
import pytest
import simplejpeg
from PIL import Image
from sklearn.datasets import load_sample_image

from datasets.folders import boxes, images

FLOWER = Image.fromarray(load_sample_image("flower.jpg"))
needs_nvimgcodec = pytest.mark.skipif(
    not (importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nvimgcodec")),
    reason="nvImageCodec is not installed",
)


def jpeg(size, mode="RGB", **options) -> bytes:
    if options.get("subsampling") in ("4:4:0", "4:1:1"):  # unknown to Pillow
        pixels = np.array(FLOWER.resize(size))
        return simplejpeg.encode_jpeg(pixels, colorsubsampling=options["subsampling"].replace(":", ""))
    file = io.BytesIO()
    FLOWER.resize(size).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


@needs_nvimgcodec
@pytest.mark.parametrize("size", [(500, 375), (61, 47), (16, 9)])
@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": "4:4:4"}, {"subsampling": "4:2:2"}, {"subsampling": "4:2:0", "quality": 97},
        {"mode": "L"}, {"restart_marker_rows": 2},
        {"restart_marker_blocks": 5, "subsampling": "4:2:0"}, {"optimize": True, "quality": 30},
        {"subsampling": "4:4:0"}, {"subsampling": "4:1:1"}, {"keep_rgb": True},
    ],
    ids=str,
)  # fmt: skip
def test_its_pixels_are_those_of_the_whole(size, options):
    content, draw = jpeg(size, **options), np.random.default_rng(7)
    whole = images.decode(content, plain=True)
    for _ in range(25):
        height, width = (
            int(draw.integers(low, side + 1)) for low, side in zip((1, 16), whole.shape[:2], strict=True)
        )
        top, left = (int(draw.integers(whole.shape[axis] - (height, width)[axis] + 1)) for axis in (0, 1))
        found = boxes.decode(content, whole.shape[0], (top, left, height, width))
        assert np.array_equal(found, whole[top : top + height, left : left + width])


@needs_nvimgcodec
def test_a_box_of_a_larger_image_is_scaled():
    content = jpeg((250, 188))
    whole = images.decode(content, plain=True)
    for box in ((0, 0, 375, 500), (10, 20, 300, 301), (374, 460, 1, 40)):
        expected = boxes.cut_out(whole, 375, box)
        assert expected.shape[0] == max(round(box[2] * 188 / 375), 1)
        assert np.array_equal(boxes.decode(content, 375, box), expected)


@needs_nvimgcodec
def test_what_is_missing_narrow_or_no_jpeg_is_left_to_the_whole_image(capfd):
    content = jpeg((500, 375))
    cut = content[: len(content) // 2]
    assert boxes.decode(content, 375, (0, 0, 50, 500)).shape == (50, 500, 3)
    for wrong, box in (
        (cut, (0, 0, 50, 50)),
        (content, (0, 0, 375, 501)),
        (content, (0, 0, 50, 15)),
        (content[:100], (0, 0, 50, 50)),
        (b"\x89PNG", (0, 0, 50, 50)),
        (jpeg((500, 375), progressive=True), (0, 0, 50, 50)),
    ):
        assert boxes.decode(wrong, 375, box) is None
    assert capfd.readouterr() == ("", "")


@needs_nvimgcodec
def test_an_orientation_that_pillow_does_not_find_turns_nothing():
    first, second = (
        b"\xff\xe1\x00\x22Exif\0\0MM\0*\0\0\0\x08\0\x01\x01%c\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0" % tag
        for tag in (0x00, 0x12)  # a width, and an orientation, which Pillow looks for in the first segment
    )
    plain = jpeg((120, 80))
    content = plain[:2] + first + second + plain[2:]
    assert images.inspect(content).plain
    whole = images.decode(content, plain=True)
    assert np.array_equal(boxes.decode(content, 80, (10, 20, 40, 50)), whole[10:50, 20:70])


def test_without_nvimgcodec_there_is_no_box(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    monkeypatch.delattr("nvidia.nvimgcodec", raising=False)
    monkeypatch.setattr(boxes, "_own", type(boxes._own)())
    assert boxes.decode(jpeg((20, 20)), 20, (0, 0, 20, 20)) is None
