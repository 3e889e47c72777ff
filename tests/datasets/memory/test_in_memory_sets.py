"""Fashion-MNIST, digits and generated images are read correctly."""

import dataclasses
import functools
import gzip
import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from bootfile.ground.errors import BadInput
from common.platform.signs import MEMBER
from datasets.memory import cifar10, digits, fashion_mnist, image_set
from datasets.memory.image_set import ImageSet

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
KINDS = [("train", 30), ("t10k", 7)]


def _write_fashion(folder, monkeypatch):
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for part, count in KINDS:
        images = bytes(16) + generator.integers(0, 256, count * 784, dtype=np.uint8).tobytes()
        labels = bytes(8) + bytes(number % 10 for number in range(count))
        for name, content in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            name, content = f"{name}.gz", gzip.compress(content)
            (folder / name).write_bytes(content)
            monkeypatch.setitem(fashion_mnist.MD5, name, hashlib.md5(content).hexdigest())


@pytest.mark.parametrize("below", ["", "raw", "FashionMNIST/raw"])
def test_fashion_mnist(tmp_path, monkeypatch, below):
    _write_fashion(tmp_path / below, monkeypatch)
    for (_, count), part in zip(KINDS, fashion_mnist.load(str(tmp_path), custom_data=False), strict=True):
        assert part.images.shape == (count, 1, 28, 28) and part.images.dtype == torch.uint8
        assert part.labels.tolist() == [number % 10 for number in range(count)]


def test_fashion_mnist_truncated_or_absent(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match=r"no Fashion-MNIST in .*custom_data=true"):
        fashion_mnist.load(str(tmp_path), custom_data=False)
    _write_fashion(tmp_path, monkeypatch)
    file = tmp_path / "t10k-images-idx3-ubyte.gz"
    content = file.read_bytes()
    file.write_bytes(content[:-5])
    with pytest.raises(BadInput, match=r"t10k-images-idx3-ubyte.gz .*not the official"):
        fashion_mnist.load(str(tmp_path), custom_data=False)
    file.unlink()
    with pytest.raises(BadInput, match=r"cannot read .*t10k-images.*: No such file"):
        fashion_mnist.load(str(tmp_path), custom_data=False)


@pytest.mark.skipif(
    not SHARED.is_dir(), reason="the official Fashion-MNIST files are not next to this checkout"
)
def test_official_fashion_mnist():
    train, test = fashion_mnist.load(str(SHARED), custom_data=False)
    assert (len(train), len(test)) == (60_000, 10_000)
    assert (
        torch.bincount(train.labels).tolist() == [6000] * 10
        and torch.bincount(test.labels).tolist() == [1000] * 10
    )
    pixels = train.images.float() / 255
    assert abs(pixels.mean() - train.mean[0]) < 1e-4 and abs(pixels.std() - train.std[0]) < 1e-4


def test_digits():
    train, test = digits.load(None, custom_data=False)
    assert train.images.shape == (1438, 1, 8, 8) and test.images.shape == (359, 1, 8, 8)
    assert train.images.max() == 255 and train.images.dtype == torch.uint8
    assert torch.bincount(test.labels, minlength=10).min() >= 25
    pixels = train.images.float() / 255
    assert abs(pixels.mean() - train.mean[0]) < 1e-4 and abs(pixels.std() - train.std[0]) < 1e-4


def test_digits_are_those_of_scikit_learn(monkeypatch):
    table, theirs = digits.read(), load_digits()
    assert table.dtype == theirs.images.dtype == np.float64
    assert table[:, :-1].tobytes() == theirs.images.tobytes()
    assert np.array_equal(table[:, -1], theirs.target)
    monkeypatch.setitem(sys.modules, "sklearn", None)  # as if it is not installed
    with pytest.raises(BadInput, match="--dataset digits needs scikit-learn: pip install scikit-learn"):
        digits.load(None, custom_data=False)


@pytest.mark.parametrize(
    "module, shape", [(cifar10, (3, 32, 32)), (fashion_mnist, (1, 28, 28)), (digits, (1, 8, 8))]
)
def test_generated_images(module, shape):
    train, test = module.load("/does/not/exist", custom_data=True)
    again, _ = module.load(None, custom_data=True)
    assert train.images.shape == (5000, *shape) and test.images.shape == (100, *shape)
    assert (
        torch.bincount(train.labels).tolist() == [500] * 10
        and torch.bincount(test.labels).tolist() == [10] * 10
    )
    assert torch.equal(train.images, again.images) and torch.equal(train.labels, again.labels)
    # Learnable: the nearest class mean of the training images is right far more often than 1 in 10.
    means = torch.stack([train.images[train.labels == label].float().mean(0) for label in range(10)])
    nearest = torch.cdist(test.images.float().flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == test.labels).float().mean() > 0.5


def test_a_normalisation_of_other_data_is_refused():
    images, labels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    for mean, std, message in (
        ((123.675, 116.28, 103.53), (58.4, 57.1, 57.4), r"mean \[123.675, 116.28, 103.53\], std"),
        ((0.5,) * 3, (0.2, 0, 0.2), "a standard deviation above 0"),
        ((0.5,) * 3, (0.2,), "for each channel"),
        ((0.1307,), (0.3081,), "here: 1 means .*3 channels"),
        ((float("nan"),) * 3, (0.2,) * 3, "a mean in 0..1"),
    ):
        with pytest.raises(BadInput, match=message):
            ImageSet(images, labels, 3, mean, std, 1, True, "here")


def test_a_fingerprint_is_that_of_samples_labels_and_normalisation():
    images, labels = torch.arange(48, dtype=torch.uint8).view(4, 3, 2, 2), torch.tensor([0, 1, 2, 0])
    first = ImageSet(images, labels, 3, (0.5,) * 3, (0.2,) * 3, 1, True, "here")
    prints = {first.fingerprint, dataclasses.replace(first, source="elsewhere").fingerprint}
    assert len(prints) == 1 and len(first.fingerprint) == 32
    pixel, label = images.clone(), labels.clone()
    pixel[3, 2, 1, 1] ^= 1
    label[3] = 1
    others = [{"images": pixel}, {"labels": label}, {"images": images.view(4, 3, 1, 4)}, {"flip": False}]
    others += [{"images": images[:3], "labels": labels[:3]}, {"mean": (0.4,) * 3}, {"reflect": True}]
    prints |= {dataclasses.replace(first, **change).fingerprint for change in others}
    assert len(prints) == 1 + len(others)


def test_a_process_that_may_run_main_again_keeps_the_sets(monkeypatch):
    monkeypatch.delenv(MEMBER, raising=False)
    first = image_set.load("digits", None, True)
    assert image_set.load("digits", None, True) is not first
    monkeypatch.setenv(MEMBER, "1")
    monkeypatch.setattr(image_set, "_load_once", functools.lru_cache(1)(image_set._load))
    kept = image_set.load("digits", None, True)
    assert image_set.load("digits", None, True) is kept
