"""Pairs of images are matched by name, have the same crop, and come once per epoch from both engines."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from bootfile.ground.errors import BadInput
from bootfile.sampling.sampler import WholeBatchSampler
from datasets.folders import paired_images, random_folder
from datasets.loaders import backends
from datasets.loaders.engines.crops import Threads
from datasets.loaders.engines.dali import PairedDali
from datasets.loaders.image_loader import ImageLoader
from datasets.stores.files import PairFiles
from tests.support.receipts import sums_of

CPU = torch.device("cpu")
MISSING = backends.reasons(CPU)["dali"]
DALI = pytest.param(PairedDali, marks=pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}"))
HALF = (0.5, 0.5, 0.5)


def threads(store, workers, device):
    return Threads(store, workers, pinned=device.type == "cuda")


ENGINES = [threads, DALI]
COUNT, BATCH, CROP = 19, 6, 32  # the last batch has one pair: some processes get none
SIZES = [(60, 48), (48, 60), (33, 200), (32, 32)]


def save(path: Path, pixels, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels)).save(path, **options)


def coordinates(number: int, side: int, width: int, height: int) -> np.ndarray:
    """Return pixels that contain their own coordinates and image: [x, y, 2 * pair + side]."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x, y, np.full_like(x, 2 * number + side)], axis=2).astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of pairs whose pixels are coordinates, PNG on one side and BMP on the other."""
    root = tmp_path_factory.mktemp("pairs")
    for number in range(COUNT):
        for side, name in enumerate(("blurry", "sharp")):
            path = root / "train" / name / f"sub_{number % 3}" / f"{number:02}.{('png', 'bmp')[side]}"
            save(path, coordinates(number, side, *SIZES[number % len(SIZES)]))
    return root


@pytest.fixture(scope="module")
def pairs(folder, tmp_path_factory):
    return paired_images.load(str(folder), "train", str(tmp_path_factory.mktemp("cache")))


def plan_of(pairs, rank=0, world_size=1, batch=BATCH, crop=CROP, training=True):
    order = WholeBatchSampler(len(pairs), batch, 7, rank=rank, world_size=world_size, shuffle=training)
    return paired_images.plan(pairs, order, crop, augment=training)


def loader_of(pairs, engine, *place, **options):
    plan = plan_of(pairs, *place, **options)
    return ImageLoader(engine(PairFiles(pairs), 2, CPU), plan, CPU, HALF, HALF)


def levels(images: torch.Tensor) -> np.ndarray:
    """Return pixels as 0..255: int [n, height, width, 3]."""
    assert images.dtype == torch.float32 and images.shape[1] == 3
    if len(images):
        assert images.min() >= -1 and images.max() <= 1
    found = (images + 1) * 127.5
    assert (found - found.round()).abs().max() < 1e-3 if len(images) else True
    return found.round().permute(0, 2, 3, 1).numpy().astype(int)


def pairs_of(loader):
    for both, _ in loader:
        yield both.tensor_split(2)


def epoch_of(loader, epoch=1, steps=None):
    """Return ([(blurry, sharp)] as levels(), the receipt's sums)."""
    loader.seek((epoch - 1) * len(loader))
    batches = []
    for blurry, sharp in pairs_of(loader):
        batches.append((levels(blurry), levels(sharp)))
        if len(batches) == steps:
            break
    return batches, torch.from_numpy(loader.receipt.take())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_pair_once_and_one_window_for_both(engine, world_size, pairs):
    windows = []
    for epoch in (1, 2):
        seen, total = [], torch.zeros(4, 3, dtype=torch.int64)
        for rank in range(world_size):
            with loader_of(pairs, engine, rank, world_size) as loader:
                batches, sums = epoch_of(loader, epoch)
                assert len(batches) == len(loader) == 4
                plan = list(loader.plan)
            total += sums
            for (blurry, sharp), batch in zip(batches, plan, strict=True):
                assert blurry.shape == sharp.shape == (len(batch.ids) // 2, CROP, CROP, 3)
                for row, (left, right) in enumerate(zip(blurry, sharp, strict=True)):
                    number = left[0, 0, 2] // 2
                    assert (left[..., 2] == 2 * number).all() and (right[..., 2] == 2 * number + 1).all()
                    assert np.array_equal(left[..., :2], right[..., :2]), "the crop changes"
                    top, start, height, width, flip = (int(column[row]) for column in batch.crops)
                    expected = coordinates(0, 0, 256, 256)[top : top + height, start : start + width, :2]
                    expected = expected[:: -1 if flip & 2 else 1, :: -1 if flip & 1 else 1]
                    assert np.array_equal(left[..., :2], expected)
                    assert f"{number:02}." in pairs.path(batch.ids[row])
                    seen.append((number, top, start, flip))
        assert sorted(number for number, *_ in seen) == list(range(COUNT))
        assert torch.equal(total, sums_of(plan_of(pairs), epoch)), "the receipt is equal at any world size"
        windows.append(seen)
    assert windows[0] != windows[1] and {flip for *_, flip in windows[0]} == {0, 1, 2, 3}
    assert [each[0] for each in windows[0]] != [each[0] for each in windows[1]], (
        "each epoch has another order"
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_without_random_parts_pairs_come_in_order_from_the_middle(engine, pairs):
    with loader_of(pairs, engine, training=False) as loader:
        batches, sums = epoch_of(loader)
        assert torch.equal(epoch_of(loader, 2)[1], sums), "every epoch is the same"
    rows = [image for blurry, _ in batches for image in blurry]
    names = [int(Path(pairs.path(id)).stem) for id in range(COUNT)]
    assert [image[0, 0, 2] // 2 for image in rows] == names
    for image, number in zip(rows, names, strict=True):
        width, height = SIZES[number % len(SIZES)]
        assert image[0, 0, :2].tolist() == [(width - CROP) // 2, (height - CROP) // 2]
        assert np.array_equal(image[-1, -1, :2] - image[0, 0, :2], [CROP - 1, CROP - 1])


@pytest.mark.parametrize("engine", ENGINES)
def test_resized_images_are_those_of_pillow(engine, tmp_path):
    """Both images are resized to --resize rows and cropped. The error is below 2 / 255 and above 30 dB."""
    photographs = load_sample_images().images
    for number in range(6):
        picture = photographs[number % 2][: 300 + 10 * number, : 500 - 31 * number]
        save(tmp_path / "train" / "img" / f"{number}.jpg", picture, quality=95)
        save(tmp_path / "train" / "gt" / f"{number}.png", picture)
    pairs = paired_images.load(str(tmp_path), "train", str(tmp_path / "cache"), rows=131)
    with loader_of(pairs, engine, crop=96) as loader:
        ((blurry, sharp),), _ = epoch_of(loader)
        (batch,) = loader.plan
    for row, found in enumerate((*blurry, *sharp)):
        whole = Image.open(pairs.path(batch.ids[row])).convert("RGB")
        shape = round(whole.width * 131 / whole.height), 131
        top, left, height, width, flip = (int(column[row]) for column in batch.crops)
        expected = np.asarray(whole.resize(shape, Image.Resampling.BILINEAR)).astype(int)
        expected = expected[top : top + height, left : left + width]
        expected = expected[:: -1 if flip & 2 else 1, :: -1 if flip & 1 else 1]
        difference = np.abs(found - expected)
        assert difference.mean() < 2 and 10 * np.log10(255**2 / (difference**2).mean()) > 30


def test_partners_have_the_same_name_not_the_same_place(tmp_path):
    """These files would be paired wrongly if both sides were sorted by file name."""
    for number, name in enumerate(("x", "x.q")):
        save(tmp_path / "train" / "img" / "a" / f"{name}.png", coordinates(number, 0, 32, 32))
    for number, name in enumerate(("x.webp", "x.q.bmp")):
        save(tmp_path / "train" / "gt" / "a" / name, coordinates(number, 1, 32, 32), lossless=True)
    assert sorted(os.listdir(tmp_path / "train" / "gt" / "a")) == ["x.q.bmp", "x.webp"]
    pairs = paired_images.load(str(tmp_path), "train", str(tmp_path / "cache"))
    found = [(os.path.basename(pairs.path(pair)), os.path.basename(pairs.path(pair + 2))) for pair in (0, 1)]
    assert found == [("x.png", "x.webp"), ("x.q.png", "x.q.bmp")]


# errors


def small(*names, width=40, height=36):
    """Return a function that makes images in <root>/train. A name without extension is an empty folder."""

    def make(root):
        for name in names:
            if "." in name:
                save(root / "train" / name, np.zeros((height, width, 3), np.uint8))
            else:
                (root / "train" / name).mkdir(parents=True)

    return make


def uneven(root):
    small("img/a/1.png")(root)
    small("gt/a/1.png", width=39)(root)


def broken(root):
    small("img/a/1.png", "gt/a")(root)
    (root / "train" / "gt" / "a" / "1.png").write_bytes(b"")


EXPECTED = "expected blurry/ and sharp/ or img/ and gt/"
BAD = {
    "no split": (lambda root: None, "ROOT has no folder train/"),
    "no sides": (small("a/1.png"), f"ROOT/train has none of these folders: {EXPECTED}"),
    "one side": (small("blurry/a/1.png"), f"ROOT/train has blurry/: {EXPECTED}"),
    "mixed spellings": (small("blurry/1.png", "gt/1.png"), f"ROOT/train has blurry/ and gt/: {EXPECTED}"),
    "empty folder": (small("blurry", "sharp/a/1.png"), r"ROOT/train/blurry holds no image \(\.jpg \.jpeg"),
    "one-sided pairs": (
        small("img/a/1.png", "img/a/2.png", "gt/a/1.png", "gt/b/3.jpg"),
        r"\b2 of 4 .*ROOT/train .*no partner: img/a/2\.png .*no gt/a/2\.\*; gt/b/3\.jpg .*no img/b/3\.\*",
    ),
    "the same name twice": (
        small("img/1.png", "img/1.bmp", "gt/1.png"),
        r"ROOT/train: img/1\.bmp and img/1\.png .*same name",
    ),
    "another size": (uneven, r"\b1 of 1 .*ROOT/train .*size: img/a/1\.png \(40x36 .*gt/a/1\.png \(39x36 "),
    "a bad image": (broken, r"\b1 of 2 .*ROOT/train .*bad: ROOT/train/gt/a/1\.png: .*empty \(0 bytes\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_set_of_pairs_is_named(case, tmp_path):
    make, message = BAD[case]
    make(tmp_path)
    with pytest.raises(BadInput, match=message.replace("ROOT", str(tmp_path))):
        paired_images.load(str(tmp_path), "train", str(tmp_path / "cache"))


def test_a_crop_that_does_not_fit_is_named(pairs, folder, tmp_path):
    with pytest.raises(BadInput, match=r"\b8 of 38 images .*--crop 33: \S+ .*\b32x32 pixels; "):
        plan_of(pairs, crop=33)
    resized = paired_images.load(str(folder), "train", str(tmp_path), rows=24)
    assert resized.describe_size(int(resized.widths.argmin())) == "4x24 pixels, resized from 33x200 pixels"
    expected = "38 of 38 .* 30x24 pixels, .* 60x48 pixels; .*; and 28 more"
    with pytest.raises(BadInput, match=expected):
        plan_of(resized, crop=25)


def test_a_gpu_that_is_not_there_and_dali_that_is_not_installed(pairs, monkeypatch):
    with pytest.raises(BadInput, match=r"--dali_device gpu: .*(needs a GPU|pip install nvidia-dali)"):
        PairedDali(PairFiles(pairs), 1, CPU, "gpu")
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)  # an import fails
    with pytest.raises(BadInput, match="nvidia-dali-cuda120"):
        PairedDali(PairFiles(pairs), 1, CPU)


def test_generated_pairs_are_pairs(tmp_path):
    root = random_folder.make_pairs(str(tmp_path / "generated"))
    counts = {split: len(paired_images.load(root, split, str(tmp_path))) for split in ("train", "test")}
    assert counts == {"train": 26, "test": 8} and random_folder.make_pairs(root) == root


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 280])
def test_on_a_gpu_the_same_pairs_and_nearly_the_same_pixels(rows, tmp_path):
    pytest.importorskip("nvidia.dali")
    device = torch.device("cuda", torch.cuda.current_device())
    root = random_folder.make_pairs(str(tmp_path / "generated"))
    pairs = paired_images.load(root, "train", str(tmp_path), rows)
    order = WholeBatchSampler(len(pairs), 6, 7)
    plan = paired_images.plan(pairs, order, 128, augment=True)
    found = {}
    for name, engine in (
        ("threads", threads(PairFiles(pairs), 2, device)),
        ("cpu", PairedDali(PairFiles(pairs), 2, device, "cpu")),
        ("gpu", PairedDali(PairFiles(pairs), 2, device)),
    ):
        with ImageLoader(engine, plan, device, HALF, HALF) as loader:
            for epoch in (1, 2):
                loader.seek((epoch - 1) * len(loader))
                batches = [(blurry.cpu(), sharp.cpu()) for blurry, sharp in pairs_of(loader)]
            assert all(blurry.is_cuda and sharp.is_cuda for blurry, sharp in pairs_of(loader))
            found[name] = batches, torch.from_numpy(loader.receipt.take())
    for name in ("cpu", "gpu"):
        assert torch.equal(found[name][1], found["threads"][1])
        for ours, theirs in zip(found["threads"][0], found[name][0], strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert (one - other).abs().mean() * 127.5 < 2, name
