"""CIFAR-10 is read from all official layouts. The files are small, and the md5 table expects them."""

import hashlib
import io
import os
import pickle
import shutil
import struct
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from bootfile.ground.errors import BadInput
from datasets.memory import cifar10
from tests.support.hostile_pickle import Hostile

N = 20  # images a file


def _content(number):
    generator = np.random.default_rng(number)
    return generator.integers(0, 256, (N, 3072), dtype=np.uint8), generator.integers(0, 10, N).tolist()


def _python_batch(number):
    images, labels = _content(number)
    buffer = io.BytesIO()
    _Python2Pickler(buffer, protocol=2).dump({b"data": images, b"labels": labels, b"batch_label": b"a batch"})
    return buffer.getvalue().replace(b"numpy._core.", b"numpy.core.")


class _Python2Pickler(pickle._Pickler):
    """A pickler that writes byte strings like Python 2, which wrote the official files."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

    def save_bytes(self, value):
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    dispatch[bytes] = save_bytes


NAMES = [*cifar10.TRAIN_FILES, *cifar10.TEST_FILES]


@pytest.fixture
def known(monkeypatch):
    """Make the md5 table expect these contents."""

    def learn(**contents: bytes):
        for name, content in contents.items():
            monkeypatch.setitem(cifar10.MD5, name, hashlib.md5(content).hexdigest())

    return learn


def _check(sets):
    train, test = sets
    assert (len(train), len(test)) == (5 * N, N)
    assert train.images.dtype == torch.uint8 and train.images.shape[1:] == (3, 32, 32)
    assert train.labels.dtype == torch.int64
    generated, _ = cifar10.load(None, custom_data=True)
    for name in ("mean", "std", "padding", "flip"):
        assert getattr(train, name) == getattr(generated, name), "one normalisation for every source"
    for number in range(6):
        images, labels = _content(number)
        part = test if number == 5 else train
        rows = slice(0, N) if number == 5 else slice(number * N, (number + 1) * N)
        assert np.array_equal(part.images[rows].numpy().reshape(N, -1), images)
        assert part.labels[rows].tolist() == labels


def _files(known):
    """Return file name -> content; the md5 table expects these files."""
    batches = {name: _python_batch(number) for number, name in enumerate(NAMES)}
    known(**batches)
    return batches


@pytest.mark.parametrize("folder", ["", cifar10.FOLDER])
def test_folder(tmp_path, known, folder):
    place = tmp_path / folder
    place.mkdir(exist_ok=True)
    for name, content in _files(known).items():
        (place / name).write_bytes(content)
    sets = cifar10.load(str(tmp_path), custom_data=False)
    _check(sets)
    assert "official files, checked" in sets[0].source


def _archive(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_archive_is_read_in_place(tmp_path, known):
    members = {f"{cifar10.FOLDER}/{name}": each for name, each in _files(known).items()}
    content = _archive({"../escaped": b"!", "/escaped": b"!"} | members)
    known(**{cifar10.ARCHIVE: content})
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / cifar10.ARCHIVE).write_bytes(content)
    _check(cifar10.load(str(folder), custom_data=False))
    assert [entry.name for entry in tmp_path.rglob("*")] == ["data", cifar10.ARCHIVE]


def test_class_folders(tmp_path, monkeypatch):
    def write_png(pixels, path):
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)

    for part, count in (("train", 2), ("test", 1)):
        for label, name in enumerate(cifar10.CLASSES):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                image = torch.full((3, 32, 32), 10 * label + number, dtype=torch.uint8)
                write_png(image, str(tmp_path / part / name / f"{number}.png"))
    train, test = cifar10.load(str(tmp_path), custom_data=False)
    assert train.labels.tolist() == [label for label in range(10) for _ in range(2)]
    assert [int(image[0, 0, 0]) for image in test.images] == [10 * label for label in range(10)]
    assert train.class_names == test.class_names == cifar10.CLASSES
    (tmp_path / "test" / "airplane").rename(tmp_path / "airplane")
    assert cifar10.load(str(tmp_path), custom_data=False)[1].labels.tolist() == [*range(1, 10)]
    (tmp_path / "airplane").rename(tmp_path / "test" / "airplane")
    assert "copy" in train.source and f"{tmp_path}/train and {tmp_path}/test" in train.source
    for name in ("train", "test"):
        (tmp_path / name).rename(tmp_path / f"{name.title()}ing")
    assert len(cifar10.load(str(tmp_path), custom_data=False)[1]) == 10
    (tmp_path / "Testing").rename(tmp_path / "holdout")
    monkeypatch.setattr(cifar10, "download", lambda *_: pytest.fail("it must not be downloaded"))
    with pytest.raises(BadInput, match=r"has Training, .*no val "):
        cifar10.load(str(tmp_path), custom_data=False)
    (tmp_path / "Training").rename(tmp_path / "train")
    (tmp_path / "holdout").rename(tmp_path / "test")
    shutil.copy(tmp_path / "train" / "cat" / "0.png", tmp_path / "train" / "cat" / "0.jpg")
    assert len(cifar10.load(str(tmp_path), custom_data=False)[0]) == 21, "a PNG may be named .jpg"
    write_png(torch.zeros(3, 16, 32, dtype=torch.uint8), str(tmp_path / "test" / "cat" / "0.png"))
    with pytest.raises(BadInput, match=r"cat.0\.png is 32x16 pixels, expected 32x32"):
        cifar10.load(str(tmp_path), custom_data=False)
    monkeypatch.setattr("PIL.EpsImagePlugin.has_ghostscript", lambda: pytest.fail("Pillow opens EPS files"))
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\n"
    for content in (postscript, b"<html>"):
        (tmp_path / "test" / "cat" / "0.png").write_bytes(content)
        with pytest.raises(BadInput, match=r"cannot decode .*0\.png"):
            cifar10.load(str(tmp_path), custom_data=False)


@pytest.mark.parametrize(
    "name",
    ["cifar-100-python", "CIFAR-10-images", "cifar-10-batches-bin", "cifar-10-binary.tar.gz", "cifar10.npz"],
)
def test_other_forms_are_refused_and_not_replaced_by_a_download(tmp_path, monkeypatch, name):
    fetched = []
    monkeypatch.setattr(cifar10, "download", lambda *_: fetched.append(1))
    (tmp_path / name).touch()
    (tmp_path / f".{cifar10.ARCHIVE}.part").touch()
    with pytest.raises(BadInput, match=rf"no CIFAR-10 in {tmp_path}, .*{name} .*another form .*--data_url"):
        cifar10.load(str(tmp_path), custom_data=False)
    (tmp_path / name).unlink()
    with pytest.raises(AssertionError):
        cifar10.load(str(tmp_path), custom_data=False)
    assert fetched


@pytest.mark.parametrize("name, cut, message", [
    *[("data_batch_3", cut, "data_batch_3 .*not the official .*md5 .*, expected md5")
      for cut in (0, 1, 1000, -1)],
    ("data_batch_2", None, "cannot read .*data_batch_2: No such file"),
])  # fmt: skip
def test_a_batch_that_is_truncated_or_missing(tmp_path, known, name, cut, message):
    files = _files(known)
    files[name] = files[name][:cut]
    for each, content in files.items():
        (tmp_path / each).write_bytes(content)
    if cut is None:
        (tmp_path / name).unlink()
    with pytest.raises(BadInput, match=message):
        cifar10.load(str(tmp_path), custom_data=False)


@pytest.mark.parametrize("protocol", range(6))
def test_hostile_pickle_executes_nothing(tmp_path, known, protocol):
    trap, files = tmp_path / "executed", _files(known)
    files["data_batch_1"] = pickle.dumps(Hostile(os.system, f"touch {trap}"), protocol)
    known(**files)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=r"which is not allowed"):
        cifar10.load(str(tmp_path), custom_data=False)
    assert not trap.exists()
