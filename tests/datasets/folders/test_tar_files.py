"""Shards are found by patterns, and indexed once; the images in tar files are those of the same folder."""

import gzip
import io
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

from bootfile.ground.errors import BadInput
from datasets.folders import image_folder, listing, tar_files
from datasets.stores import pack
from datasets.stores.files import FileStore
from tests.support import pictures, tars

FILES = [("a/1.jpg", b"x" * 700), ("a/1.cls", b"3"), ("a/1.seg.png", b"y"), (".hidden", b"z"), ("2.jpg", b"")]


def look(pattern, split="train", cache=None, classes=None, val_share=0.0, log=print):
    return tar_files.look(str(pattern), split, str(cache) if cache else None, classes, log, val_share)


def test_patterns_name_the_files(tmp_path):
    for name in ("s/007.tar", "s/008.tar", "s/010.tar", "t/x.tar"):
        tars.write(tmp_path / name, FILES)
    for pattern, names in {
        "s/*.tar": ["s/007.tar", "s/008.tar", "s/010.tar"],
        "s/{007..008}.tar": ["s/007.tar", "s/008.tar"],
        "[st]/01?.tar": ["s/010.tar"],
        "**/x.tar": ["t/x.tar"],
        "s/010.tar": ["s/010.tar"],
    }.items():
        assert tar_files.find(f"{tmp_path}/{pattern}") == [f"{tmp_path}/{name}" for name in names], pattern
    both = [f"{tmp_path}/s/007.tar", f"{tmp_path}/t/x.tar"]
    assert tar_files.find([both[1], f"{tmp_path}/s/*7.tar"]) == both
    with pytest.raises(BadInput, match=r"no file 009\.tar"):
        tar_files.find(f"{tmp_path}/s/{{007..010}}.tar")
    for pattern in ([], f"{tmp_path}/s/{{5..1}}.tar"):
        with pytest.raises(BadInput, match="expected"):
            tar_files.find(pattern)


def test_a_tar_is_indexed(tmp_path):
    path = str(tars.write(tmp_path / "0.tar", FILES))
    index = tar_files.load_index([path], tar_files.scan_tar, None)
    assert index["name"].tolist() == [b"a/1.jpg", b"a/1.cls", b"a/1.seg.png", b"2.jpg"]
    assert index["is_first"].tolist() == [1, 0, 0, 1] and index["label"].tolist() == [-1, 3, -1, -1]
    places = index[["offset", "size"]].tolist()
    assert [tar_files.read_member(path, *place) for place in places] == [b"x" * 700, b"3", b"y", b""]


def test_the_index_is_made_once_and_again_if_a_file_changes(tmp_path):
    paths = [str(tars.write(tmp_path / name, FILES)) for name in ("0.tar", "1.tar")]
    scanned = []

    def scan(path):
        scanned.append(path)
        return tar_files.scan_tar(path)

    for number in range(4):
        if number == 2:
            tars.write(tmp_path / "1.tar", [("a-longer-name.txt", b"")])
        index = tar_files.load_index(paths, scan, None)
        assert scanned == paths * (1 + number // 2)
        assert index["file"].tolist() == ([0] * 4 + [1] * 4 if number < 2 else [0] * 4 + [1])
    for place in tmp_path.glob(".files-*.npy"):
        place.write_bytes(place.read_bytes()[:-1])
    assert len(tar_files.load_index(paths, scan, None)) == 5, "an index that is cut is made again"
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cache_dir"):
        tar_files.load_index(paths, scan, str(tmp_path / "file"))
    (tmp_path / "2.tar").symlink_to("missing")
    with pytest.raises(BadInput, match=r"cannot read .*2\.tar"):
        tar_files.load_index(tar_files.find(f"{tmp_path}/*.tar"), scan, None)


@pytest.mark.parametrize("damage, offset", [
    (lambda tar: tar[:900], 0),  # in the content of the first file, whose header is at 0
    (lambda tar: tar[:1536], 1536),  # between two files
    (lambda tar: tar[:1600], 1536),  # in the header of the second file
    (lambda tar: tar[:1536] + b"\1" * 512 + tar[2048:], 1536),
    (gzip.compress, 0),
    (lambda tar: b"", 0),
], ids=["cut content", "cut between files", "cut header", "header", "gzip", "empty"])  # fmt: skip
def test_a_damaged_tar_is_one_line_with_its_path_and_byte(tmp_path, damage, offset):
    path = tars.write(tmp_path / "0.tar", FILES)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadInput, match=rf"^{re.escape(str(path))} is .* at byte {offset}: .+"):
        look(path)


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.GNUTYPE_SPARSE])
def test_links_and_sparse_files_in_a_tar_are_refused(tmp_path, kind):
    path = tars.write(tmp_path / "0.tar", [("a.jpg", b"")])
    member = tarfile.TarInfo("b.jpg")
    member.type, member.linkname = kind, "a.jpg"
    with tarfile.open(path, "a") as tar:
        tar.addfile(member, io.BytesIO())
    with pytest.raises(BadInput, match=r"byte 512: b\.jpg .*link"):
        tar_files.scan_tar(str(path))


def test_a_folder_may_have_the_name_of_a_tar(tmp_path):
    root = pictures.make(tmp_path / "x.tar/123456789012", train=4, val=3)
    (tmp_path / "y.tar").symlink_to(root)
    index = image_folder.load(str(tmp_path / "y.tar"), "train", str(tmp_path / "cache"))
    assert FileStore(index).read(range(4)) == [Path(index.path(id)).read_bytes() for id in range(4)]
    assert tar_files.split_path(f"{root}/a.tar/000000000512/b.tar/000000000001/c") == (f"{root}/a.tar", 512)
    assert tar_files.split_path(f"{root}/1.jpg") is None


def test_an_archive_next_to_the_images_of_a_table_is_not_their_data(tmp_path):
    root = tmp_path / "data"
    pictures.write(root, 4, (40, 32), "jpg")
    (root / "train.txt").write_text("".join(f"{id}.jpg {id % 2}\n" for id in range(4)))
    tars.write(root / "download.tar", [("a/0.jpg", b""), ("b/1.jpg", b"")])
    index = image_folder.load(str(root), "train", str(tmp_path / "cache"))
    assert index.labels.tolist() == [0, 1, 0, 1]


def test_numeric_class_folders_have_the_numbers_of_loose_folders(tmp_path):
    files = [(f"{name}/1.jpg", b"") for name in ("1", "10", "2")]
    tars.write(tmp_path / "train.tar", files)
    for name, content in files:
        (tmp_path / "loose" / name).parent.mkdir(parents=True)
        (tmp_path / "loose" / name).write_bytes(content)
    packed, loose = look(tmp_path / "*.tar"), listing.look(str(tmp_path / "loose"), "train", None, print)
    assert packed.classes == loose.classes and packed.labels.tolist() == loose.labels.tolist()


def test_folders_of_splits_in_a_tar_are_splits_and_not_classes(tmp_path):
    names = ["/Train/a/1.jpg", "Train/b/2.jpg", "val/a/3.jpg", "val/b/4.jpg", "test/b/5.jpg", "more/b/6.jpg"]
    tars.write(tmp_path / "images.tar", [(name, b"") for name in names])
    for split, ends in (("train", ["1.jpg", "2.jpg"]), ("val", ["3.jpg", "4.jpg"])):
        lines = []
        found = look(tmp_path / "*.tar", split, val_share=0.5, log=lines.append)
        assert lines == [f"{tmp_path}/*.tar: ignored images of no split 2"]
        assert found.classes == ("a", "b") and found.labels.tolist() == [0, 1]
        assert [os.path.basename(path) for path in found.paths] == ends


def test_a_shard_that_is_cut_later_is_one_line(tmp_path):
    path = tars.write(tmp_path / "0.tar", FILES)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(BadInput, match=r"0\.tar is cut: .*\b488 of 700 bytes .*byte 512"):
        tar_files.read_member(str(path), 512, 700)


@pytest.mark.parametrize("with_cls", [False, True])
def test_images_in_tars_are_those_of_the_folder(tmp_path, with_cls):
    folder = pictures.make(tmp_path / "folder", train=20, val=9, all_kinds=True)
    pattern = tars.from_folder(folder, tmp_path / "shards", 3, with_cls)
    cache = str(tmp_path / "cache")
    (tmp_path / "data [v2] {1..3}").symlink_to(tmp_path / "shards")
    for split in ("train", "val"):
        loose, packed = (image_folder.load(str(root), split, cache) for root in (folder, pattern))
        for column in ("labels", "widths", "heights", "plain", "bytes", "crc32"):
            assert np.array_equal(getattr(loose, column), getattr(packed, column)), column
        assert packed.classes == (("0", "1", "2") if with_cls else loose.classes)
        ids = np.arange(len(loose))
        assert FileStore(packed, verified=True).read(ids) == FileStore(loose).read(ids)
        assert packed.find(packed.path(5)) == 5
        for name in ("shards", "data [v2] {1..3}"):
            whole = image_folder.load(str(tmp_path / name), split, cache)
            assert whole.fingerprint == packed.fingerprint, "a platform passes the folder of the tar files"
    encoded = pack.build(packed, str(tmp_path / "pack"), "encoded")
    assert encoded.read(ids) == FileStore(loose).read(ids)
    assert not list((tmp_path / "shards").glob(".*")), "the index is in the cache folder"


def test_tars_without_splits_are_divided_by_the_names_of_the_images(tmp_path):
    names = [f"class{number % 2}/{number}.jpg" for number in range(60)]
    parts = []
    for count in (1, 4):  # the division does not depend on the tar files
        for number in range(count):
            files = [(name, b"image") for name in names[number::count]]
            tars.write(tmp_path / str(count) / f"{number}.tar", files)
        listings = [look(tmp_path / str(count) / "*.tar", split, val_share=0.2) for split in ("train", "val")]
        parts.append([{path.split("/", 2)[2] for path in listing.paths} for listing in listings])
    (train, val), others = parts
    assert [train, val] == others and train | val == set(names) and not train & val and 4 < len(val) < 25


@pytest.mark.parametrize("names, files, message", [
    (["train.tar"], [("1.jpg", b""), ("1.cls", b"cat")], "sample 1: expected a number"),
    (["train.tar"], [("1.txt", b"")], "holds no image"),
    (["test.tar"], [("a/1.jpg", b"")], "no file .*train .*training"),
    (["train.tar"], [("1.jpg", b""), ("1.cls", b"7")], "class '7', .*0..N-1 or 1..N"),
    (["train.tar"], [("a/1.jpg", b""), ("a/1.cls", b"cat")], r"train\.tar: sample a/1: expected a number"),
    (["train.tar"], [("../a/1.jpg", b"")], r"train\.tar: \.\./a/1\.jpg"),
    (["images.tar"], [("data/a/1.jpg", b""), ("data/b/2.jpg", b"")], "one class, data: expected"),
    (["images.tar"], [("val/a/1.jpg", b"")], "split train"),
])  # fmt: skip
def test_bad_tar_files_are_one_line(tmp_path, names, files, message):
    for name in names:
        tars.write(tmp_path / name, files)
    with pytest.raises(BadInput, match=message):
        look(tmp_path / "*.tar")


def test_a_sample_has_one_image_and_its_cls(tmp_path):
    """Other fields are counted. Names in folders with dots, of any capitals, and files of macOS are right."""
    names = ["./v1.0/a.JPG", "./v1.0/a.json", "./v1.0/a.seg.png", "./v1.0/a.cls", "._b.jpg", "__MACOSX/b.jpg",
             "b.CLS", "b.png", "README.md", "v1.0/c.cls", "v1.0/c.jpg"]  # fmt: skip
    labels = {"a.cls": b"1\n", "b.CLS": b" 0", "c.cls": b"1"}
    tars.write(tmp_path / "train.tar", [(name, labels.get(os.path.basename(name), b"")) for name in names])
    lines = []
    found = look(tmp_path / "*.tar", log=lines.append)
    parts = [path.split("/", 2)[2] for path in found.paths]
    assert dict(zip(parts, found.labels.tolist(), strict=True)) == {
        "v1.0/a.JPG": 1,
        "b.png": 0,
        "v1.0/c.jpg": 1,
    }
    assert lines == [f"{tmp_path}/*.tar: ignored .json 1, .png 1, .md 1"]


def test_names_with_dots_in_class_folders_without_cls(tmp_path):
    names = ["cat/10.05.jpg", "cat/10.06.jpg", "dog/10.05.jpg", "cat/10.jpg", "dog/1.jpg", "cat/10.07.jpg"]
    tars.write(tmp_path / "train.tar", [(name, b"") for name in names])
    found = look(tmp_path / "*.tar")
    assert len(found.paths) == 6
    assert all(
        found.classes[label] == path.split("/")[2]
        for path, label in zip(found.paths, found.labels.tolist(), strict=True)
    )


@pytest.mark.parametrize("names, message", [
    (
        ["10.00.jpg", "10.00.cls", "10.01.jpg", "10.01.cls"],
        r"sample 10 has 00\.jpg, 00\.cls, 01\.jpg, 01\.cls: ",
    ),
    (
        ["a/10.00.jpg", "a/10.00.cls", "b/11.00.jpg", "b/11.00.cls"],
        r"sample a/10 has 00\.jpg, 00\.cls: expected",
    ),
    (["1.jpg", "2.jpg", "1.cls", "2.cls"], r"sample 1: .*\bcls .*not next"),
    (["1.jpg", "1.png", "1.cls"], r"sample 1 has jpg, png, cls: expected"),
    (["1.jpg", "1.cls", "2.jpg"], r"sample 2 has jpg: expected one .cls"),
    (["cat/1.jpg", "cat/1.cls", "dog/2.jpg"], r"sample dog/2 has jpg: expected one .cls"),
    (["1.jpg", "1.cls", "2.heic", "2.cls"], r"sample 2 has heic, cls: expected"),
    (["1.jpg", "1.cls", "1.jpg"], r"1\.jpg is there twice"),
    (["cat/1.jpg", "dog/1.jpg", "cat/1.jpg"], r"cat/1\.jpg is there twice"),
])  # fmt: skip
def test_samples_that_are_no_samples_of_webdataset_are_refused(tmp_path, names, message):
    tars.write(tmp_path / "train.tar", [(name, b"1") for name in names])
    with pytest.raises(BadInput, match=rf"train\.tar.*{message}"):
        look(tmp_path / "*.tar")


def test_a_sample_in_two_tars_is_refused(tmp_path):
    tars.write(tmp_path / "train-0.tar", [("1.jpg", b""), ("1.cls", b"1"), ("2.jpg", b"")])
    tars.write(tmp_path / "train-1.tar", [("2.cls", b"1"), ("3.jpg", b""), ("3.cls", b"0")])
    with pytest.raises(BadInput, match=r"train-0\.tar: sample 2 has jpg: expected one \.cls"):
        look(tmp_path / "*.tar")


def test_names_of_tars_are_splits_of_any_name(tmp_path):
    files = [("a/1.jpg", b""), ("b/2.jpg", b"")]
    for name in ("Training-0", "dev-0", "test-0", "fold1", "fold10"):
        tars.write(tmp_path / f"{name}.tar", files)

    def tars_of(split, splits=""):
        listing = tar_files.look(
            f"{tmp_path}/*.tar", split, str(tmp_path), ("a", "b"), lines.append, 0.5, splits
        )
        return {path.split("/")[0] for path in listing.paths}

    lines = []
    assert tars_of("train") == {"Training-0.tar"} and tars_of("val") == {"dev-0.tar"}
    assert lines[0].endswith("ignored /fold1.tar; /fold10.tar; /test-0.tar")
    assert tars_of("train", "fold1,test") == {"fold1.tar"} and tars_of("val", "fold10,fold1") == {"fold1.tar"}
    tars.write(tmp_path / "train-and-test.tar", files)
    (tmp_path / "dev-0.tar").unlink()
    with pytest.raises(BadInput, match=r"train-and-test\.tar .*both splits"):
        tars_of("train")
    with pytest.raises(BadInput, match=r"--splits A,B: .*no file .*no folder"):
        tars_of("train", "A,B")
