"""Packs of small JPEGs: their geometry, pixels and bytes, and how they are built, resumed and mended."""

import io
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, JpegImagePlugin
from sklearn.datasets import load_sample_images

from bootfile.ground.errors import BadInput
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler
from datasets.folders import image_folder
from datasets.loaders import backends
from datasets.loaders.engines.crops import RemoteCrops
from datasets.sampling.augment import random_resized_crop
from datasets.stores import forms, pack

KINDS = {  # name of a file -> mode, options of Pillow
    "photograph.jpg": ("RGB", {"quality": 95}),
    "grey.jpg": ("L", {"quality": 95}),
    "cmyk.jpg": ("CMYK", {"quality": 95}),
    "palette.png": ("P", {}),
    "alpha.png": ("RGBA", {}),
    "turned.jpg": ("RGB", {"quality": 95, "orientation": 6}),
    "small.jpg": ("RGB", {"quality": 95, "size": (97, 61)}),
    "even.jpg": ("RGB", {"quality": 95, "size": (512, 384)}),
}
DIFFERENCE = 3.5  # mean of |jpeg - decoded|, of 255, for one photograph; guides/caches.md has it


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Two photographs of each kind."""
    root = tmp_path_factory.mktemp("images")
    for number, pixels in enumerate(load_sample_images().images):
        (root / "train" / f"class_{number}").mkdir(parents=True)
        for name, (mode, options) in KINDS.items():
            options = dict(options)
            image = Image.fromarray(pixels).resize(options.pop("size", (640, 427))).convert(mode)
            if turned := options.pop("orientation", None):
                exif = options["exif"] = Image.Exif()
                exif[0x0112] = turned
            image.save(root / "train" / f"class_{number}" / name, **options)
    return image_folder.load(str(root), "train", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def packs(index, tmp_path_factory):
    root = tmp_path_factory.mktemp("packs")
    return {form: pack.build(index, pack.place(str(root), index, form), form) for form in forms.FORMS}


def names(index) -> list[str]:
    return [os.path.basename(index.path(id)) for id in range(len(index))]


def test_every_kind_becomes_an_rgb_jpeg_of_the_decoded_size(index, packs):
    meta = pack.described(packs["jpeg"].path)
    assert meta | {"short_side": 256, "quality": 90, "form": "jpeg"} == meta
    sides = {form: pack.described(packs[form].path)["short_side"] for form in packs}
    assert {form for form, side in sides.items() if not side} == {"encoded", "jpeg_full"}
    assert {packs["jpeg"].image(id).shape for id in range(len(index))} == {
        (256, 384, 3), (384, 256, 3), (61, 97, 3), (256, 341, 3),
    }  # fmt: skip
    for id, [content] in ((id, packs["jpeg"].read([id])) for id in range(len(index))):
        image = Image.open(io.BytesIO(content))
        assert (image.format, image.mode) == ("JPEG", "RGB")
        assert JpegImagePlugin.get_sampling(image) == 2, "4:2:0"
        assert not image.getexif() and image.size[::-1] == packs["decoded"].image(id).shape[:2]
        assert np.array_equal(packs["jpeg"].image(id), np.asarray(image)), "as Pillow decodes it"


def test_pixels_are_near_the_decoded_ones(index, packs):
    for id, name in enumerate(names(index)):
        jpeg, decoded = (packs[form].image(id).astype(np.float64) for form in ("jpeg", "decoded"))
        difference = np.abs(jpeg - decoded)
        is_photograph = name not in ("palette.png", "small.jpg")  # dithered; sharp, because it is not scaled
        assert difference.mean() < (DIFFERENCE if is_photograph else 2 * DIFFERENCE), name


def test_it_takes_a_fraction_of_the_bytes(index, packs):
    photographs = [id for id, name in enumerate(names(index)) if name == "photograph.jpg"]
    size = {form: sum(len(packs[form].stored(id)[0].content) for id in photographs) for form in forms.FORMS}
    assert size["jpeg"] < 0.35 * size["encoded"] and size["jpeg"] < 0.2 * size["decoded"]
    whole = pack.size_of(index, "jpeg")
    made = sum(len(packs["jpeg"].stored(id)[0].content) for id in range(len(index)))
    assert 0.5 < whole / made < 2, "what is asked of the disk before it is made"


def test_a_worker_of_ray_cuts_as_a_thread_does(index, packs):
    plan = Plan(index, BatchSampler(len(index), 8, 7), random_resized_crop, 96)
    with backends.build("threads", packs["jpeg"], plan, torch.device("cpu"), 2) as loader:
        plan.seek(0)
        batch, images = next(found := loader.engine.run(plan))
        expected = images.clone().numpy()
        found.close()
    crops = pickle.loads(pickle.dumps(RemoteCrops(packs["jpeg"])))
    assert np.array_equal(crops(batch), expected)


def test_an_image_that_is_too_long_for_a_jpeg_is_named(tmp_path):
    for name, size in (("a", (66000, 4)), ("b", (4, 4))):
        folder = tmp_path / "images" / "train" / name
        folder.mkdir(parents=True)
        Image.new("RGB", size).save(folder / "long.png")
    index = image_folder.load(str(tmp_path / "images"), "train", str(tmp_path / "cache"))
    assert pack.build(index, str(tmp_path / "decoded")).image(0).shape == (4, 66000, 3)
    with pytest.raises(BadInput, match=r"cannot make a JPEG of .*long\.png: .* 65500"):
        pack.build(index, str(tmp_path / "jpeg"), "jpeg")


def test_a_sample_without_bytes_is_made_from_its_file(index, packs, tmp_path, monkeypatch, capfd):
    """The checksum of no bytes is 0, so a page of zeros would pass."""
    store = pack.build(index, str(tmp_path / "pack"), "jpeg")
    sample, _ = store.stored(3)
    monkeypatch.setattr(store, "stored", lambda id: (sample._replace(content=sample.content[:0]), 0))
    assert np.array_equal(store.image(3), packs["jpeg"].image(3))
    assert "is damaged" in capfd.readouterr().err


def test_a_pack_of_another_quality_is_made_anew(index, tmp_path, monkeypatch):
    path = str(tmp_path / "pack")
    with monkeypatch.context() as patch:
        patch.setattr(pack, "QUALITY", 50)
        patch.setattr(forms, "QUALITY", 50)
        rough = pack.build(index, path, "jpeg")
        size = len(rough.stored(0)[0].content)
    assert json.loads(Path(path, pack.META).read_text())["quality"] == 50
    assert len(pack.build(index, path, "jpeg").stored(0)[0].content) > 1.3 * size
