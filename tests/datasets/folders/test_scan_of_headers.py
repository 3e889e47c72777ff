"""A scan of headers gives the sizes of a whole scan, reads less, and leaves damaged ends to the decoders."""

import os
import shutil

import numpy as np
import pytest
import torch

from common.ground.exits import BadInput
from datasets.folders import image_folder, images
from datasets.loaders import backends
from datasets.sampling.augment import center_crop
from datasets.sampling.sampler import Plan, SequentialBatchSampler
from datasets.stores import pack
from datasets.stores.files import FileStore, is_scanned
from tests.datasets.folders.test_images import GOOD, PHOTO, SMALL, encode, exif

CPU = torch.device("cpu")
HERE = [name for name, reason in backends.reasons(CPU).items() if not reason and name != "synthetic"]
HEAD = image_folder.HEAD
BIG = encode(images.Image.fromarray(PHOTO), quality=90)
COLUMNS = ("labels", "widths", "heights", "plain", "bytes")
assert len(BIG) > 2 * HEAD


@pytest.fixture
def data(tmp_path):
    """Return a folder with JPEGs longer and shorter than HEAD, and files that must be read as a whole."""
    root = tmp_path / "data"
    write(root / "train" / "a", {
        "big.jpg": BIG, "small.jpg": GOOD["4:4:4"][0], "turned.jpg": big(exif=exif(6)),
        "profile.jpg": encode(SMALL, icc_profile=bytes(60_000)), "notes.jpg": BIG + b"a camera's own notes",
    })  # fmt: skip
    write(root / "train" / "b", {
        "big.png": encode(images.Image.fromarray(PHOTO), "PNG"), "cmyk.jpg": big("CMYK"),
        "grey.jpg": big("L"), "misnamed.png": BIG,
    })  # fmt: skip
    write(root / "val" / "a", {"big.jpg": BIG})
    return root


def write(folder, contents):
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def big(mode="RGB", **options):
    return encode(images.Image.fromarray(PHOTO).convert(mode), quality=90, **options)


def load(root, cache, scan="headers", split="train", **options):
    log = options.pop("log", lambda line: None)
    return image_folder.load(str(root), split, str(cache), log=log, scan=scan, **options)


@pytest.mark.parametrize("name", GOOD)
def test_the_first_bytes_give_the_header_or_nothing(name):
    content, _ = GOOD[name]
    expected = images.inspect(content)
    lengths = {0, 3, 64, 500, 600, 700, 1000, 5000, HEAD, len(content) - 1}
    found = [images.inspect_head(content[:length]) for length in sorted(lengths)]
    assert all(header in (None, expected) for header in found)
    assert (expected in found) == (name != "CMYK" and content.startswith(b"\xff\xd8"))


def test_an_orientation_is_in_the_header_and_too_many_pixels_are_left_to_the_file(monkeypatch):
    for orientation in range(1, 9):
        content = big(exif=exif(orientation))
        assert images.inspect_head(content[:HEAD]) == images.inspect(content)
    monkeypatch.setattr(images, "MAX_PIXELS", 1000)
    assert images.inspect_head(BIG[:HEAD]) is None


def test_the_index_has_the_same_columns_and_another_fingerprint_and_folder(data, tmp_path):
    whole, headers = (load(data, tmp_path / "cache", scan) for scan in image_folder.SCANS)
    for name in COLUMNS:
        assert np.array_equal(getattr(whole, name), getattr(headers, name)), name
    assert (whole.head, headers.head) == (None, HEAD) and whole.folder != headers.folder
    assert headers.fingerprint.endswith("-scan-headers") and "-" not in whole.fingerprint
    assert headers.fingerprint[:12] != whole.fingerprint[:12]  # it is in the names of packs
    shutil.copytree(data, tmp_path / "copy")
    copy = load(tmp_path / "copy", tmp_path / "cache")
    assert copy.fingerprint == headers.fingerprint
    assert image_folder.open_index(headers.folder).head == HEAD


def test_it_reads_the_first_bytes_of_long_jpegs_and_a_second_start_reads_nothing(data, tmp_path, monkeypatch):
    counts, read = {}, image_folder._read_file

    def counted(path, size, head):
        content = read(path, size, head)
        counts.setdefault(os.path.basename(path), []).append(len(content))
        return content

    monkeypatch.setattr(image_folder, "_read_file", counted)
    index = load(data, tmp_path / "cache")
    for name in ("big.jpg", "turned.jpg", "notes.jpg", "grey.jpg", "misnamed.png"):
        assert counts.pop(name) == [HEAD], name
    assert counts.pop("small.jpg") == [len(GOOD["4:4:4"][0])]
    assert {name: sizes[0] for name, sizes in counts.items()} == dict.fromkeys(counts, HEAD)
    names = ("profile.jpg", "big.png", "cmyk.jpg")
    sizes = {name: os.path.getsize(next((data / "train").rglob(name))) for name in names}
    assert {name: read[1] for name, read in counts.items()} == sizes
    counts.clear()
    assert load(data, tmp_path / "cache").fingerprint == index.fingerprint and counts == {}
    (data / "train" / "a" / "small.jpg").unlink()
    assert len(load(data, tmp_path / "cache")) == len(index) - 1 and counts == {}


@pytest.mark.parametrize("content, reason", [
    (b"", "is empty"), (b"<html>" * 9999, "is not a known image"), (BIG[: HEAD - 1], "is cut"),
    (encode(images.Image.fromarray(PHOTO), "PNG")[:-99], "is cut"),
])  # fmt: skip
def test_what_the_first_bytes_show_is_bad(data, tmp_path, content, reason):
    (data / "train" / "a" / "bad.jpg").write_bytes(content)
    with pytest.raises(BadInput, match=rf"1 of 10 images of .*bad\.jpg: {reason}"):
        load(data, tmp_path / "cache")


@pytest.fixture
def cut(data, tmp_path):
    """Return an index of headers and the id of a JPEG whose end is missing."""
    path = data / "train" / "a" / "cut.jpg"
    path.write_bytes(BIG[: len(BIG) // 2])
    with pytest.raises(BadInput, match=r"cut\.jpg: is cut or damaged"):
        load(data, tmp_path / "cache", "whole")
    index = load(data, tmp_path / "cache")
    [id] = [id for id in range(len(index)) if index.path(id) == str(path)]
    return index, id


@pytest.mark.parametrize("backend", HERE)
def test_a_damaged_end_is_found_by_every_backend(backend, cut):
    index, id = cut
    plan = Plan(index, SequentialBatchSampler(len(index), 4), center_crop, 32)
    found = rf"cannot decode {index.path(id)}: .*--scan whole names all bad images"
    with (
        backends.build(backend, FileStore(index), plan, CPU, 2) as loader,
        pytest.raises(BadInput, match=found),
    ):
        list(loader)


@pytest.mark.parametrize("form", ["decoded", "jpeg"])
def test_a_damaged_end_is_found_by_a_pack(form, cut, tmp_path):
    index, id = cut
    with pytest.raises(BadInput, match=rf"cannot decode {index.path(id)}: .*--scan whole"):
        pack.build(index, str(tmp_path / "pack"), form)


def test_complete_images_are_the_same_in_every_backend(data, tmp_path):
    """Also those with bytes after the end."""
    index, found = load(data, tmp_path / "cache"), []
    for backend in ("threads", "pytorch"):
        plan = Plan(index, SequentialBatchSampler(len(index), 10), center_crop, 224)
        with backends.build(backend, FileStore(index), plan, CPU, 2) as loader:
            found.append(torch.cat([images.clone().float() for images, _ in loader]))
    assert (found[0] - found[1]).abs().mean() < 0.05


def test_only_the_first_bytes_tell_whether_a_file_was_changed(data, tmp_path):
    index = load(data, tmp_path / "cache")
    store = FileStore(index, verified=True)
    content = bytearray(store.content(0))
    assert is_scanned(index, 0, bytes(content))
    content[-3] ^= 1
    assert is_scanned(index, 0, bytes(content))
    content[HEAD - 1] ^= 1
    assert not is_scanned(index, 0, bytes(content))
    with open(index.path(0), "r+b") as file:
        file.write(content)
    with pytest.raises(BadInput, match="was changed since it was scanned"):
        store.content(0)
