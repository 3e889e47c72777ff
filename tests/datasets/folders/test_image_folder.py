"""The index of a folder of images is right at the first start and after every change of the folder."""

import argparse
import functools
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import stat
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from bootfile.ground.errors import BadInput
from datasets.folders import image_folder
from datasets.folders.image_folder import load, open_index
from datasets.folders.listing import fraction, val_share
from datasets.stores.files import FileStore
from tests import conftest

PHOTO = Image.fromarray(load_sample_images().images[0])


@functools.cache
def photo(number: int, kind: str = "JPEG") -> bytes:
    """Return a part of a photograph, a different one for each number: 40 + number pixels wide, 32 high."""
    buffer = io.BytesIO()
    PHOTO.crop((number, 0, 40 + 2 * number, 32)).save(buffer, kind)
    return buffer.getvalue()


def write(folder, **contents):
    """Write different images: write(folder, cat=3) makes folder/cat/0.jpg, 1.jpg and 2.jpg."""
    for label, (name, count) in enumerate(contents.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"{number}.jpg").write_bytes(photo(10 * label + number))
    return folder


@pytest.fixture
def data(tmp_path):
    write(tmp_path / "data" / "train", cat=3, dog=2)
    write(tmp_path / "data" / "val", cat=1, dog=1)
    return tmp_path / "data"


@pytest.fixture
def lines():
    return []


@pytest.fixture
def start(tmp_path, lines):
    """Return load() with this test's cache. `lines` gets its log, `start.read` the files that were read."""

    def call(root, split="train", **options):
        lines.clear()
        read = call.read = []
        inspect = image_folder._inspect

        def counted(path, state):
            read.append(os.path.relpath(path, root))
            return inspect(path, state)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(image_folder, "_inspect", counted)
            return load(str(root), split, str(tmp_path / "cache"), log=lines.append, **options)

    return call


def names(index):
    return [os.path.relpath(index.path(id), index.base) for id in range(len(index))]


def test_class_folders(data, start, lines):
    (data / "train" / "cat" / "deep" / "er").mkdir(parents=True)
    (data / "train" / "cat" / "deep" / "er" / "b.PNG").write_bytes(photo(7, "PNG"))
    index = start(data)
    assert index.classes == ("cat", "dog") and (index.split, index.root) == ("train", str(data))
    assert names(index) == [
        "cat/0.jpg", "cat/1.jpg", "cat/2.jpg", "cat/deep/er/b.PNG", "dog/0.jpg", "dog/1.jpg",
    ]  # fmt: skip
    assert len(index) == 6 and index.labels.tolist() == [0, 0, 0, 0, 1, 1]
    assert index.widths.tolist() == [40, 41, 42, 47, 50, 51] and index.heights.tolist() == [32] * 6
    assert index.plain.all() and index.excluded == []
    assert index.bytes.tolist() == [os.path.getsize(index.path(id)) for id in range(6)]
    types = [np.int64, np.int32, np.int32, bool, np.int64]
    columns = (index.labels, index.widths, index.heights, index.plain, index.bytes)
    assert [column.dtype for column in columns] == types
    assert all(isinstance(column.base, np.memmap) and not column.flags.writeable for column in columns)
    assert lines == [] and os.path.isabs(index.path(np.int64(5)))
    for id in (-1, 6):
        with pytest.raises(IndexError, match=rf"id {id} is not in 0\.\.5"):
            index.path(id)
    for id, name in enumerate(names(index)):
        assert index.find(name) == index.find(f"{index.base}/cat/../{name}") == id
    assert index.find("cat/3.jpg") is index.find("cat") is index.find("z") is None
    assert start(data, val_share=0.5).fingerprint == index.fingerprint and start.read == lines == []
    val = start(data, "val", classes=index.classes)
    assert names(val) == ["cat/0.jpg", "dog/0.jpg"] and val.fingerprint != index.fingerprint
    assert val.base == str(data / "val")


@pytest.mark.parametrize("split, spellings", [
    ("train", ["train", "training", "Train", "TRAINING"]),
    ("val", ["val", "validation", "valid", "dev", "test", "testing", "eval", "evaluation", "Test", "VAL"]),
])  # fmt: skip
def test_spellings_of_splits(data, start, split, spellings):
    """They are those of Hugging Face's imagefolder, with any capitals."""
    fingerprint, before = start(data, split).fingerprint, split
    for spelling in spellings:
        (data / before).rename(data / spelling)
        index, before = start(data, split), spelling
        assert index.base == str(data / spelling) and os.path.isfile(index.path(0))
        assert index.fingerprint == fingerprint and start.read == []


def test_the_first_name_of_a_split_is_used_and_the_others_are_named(data, start, lines):
    write(data / "test", cat=2, dog=2)
    write(data / "Val", cat=3, dog=3)
    write(data / "more", cat=3, dog=3)
    (data / ".git").mkdir()
    assert start(data, "val").base == str(data / "val")
    assert lines == [f"{data}: val is val; not used: Val, more, test"]
    assert start(data).base == str(data / "train") and lines == []


def test_other_names_of_splits_are_named_by_an_option(tmp_path, start):
    """They hold the same class folders, here also one level deeper."""
    root, names = tmp_path / "data", ("Learning", "Holdout")
    splits = ",".join(names)
    for name, count in zip(names, (4, 2), strict=True):
        for deeper in ("", "images") if name == "Learning" else ("",):
            write(root / name / deeper, cat=count, dog=count, bird=count)
    with pytest.raises(BadInput, match=r"--splits none.* --splits TRAIN,VAL"):
        start(root)
    train = start(root, splits=splits)
    val = start(root, "val", classes=train.classes, splits=splits)
    assert [os.path.basename(index.base) for index in (train, val)] == [*names]
    assert start(root, splits=",".join(names[::-1])).base == val.base
    assert start(root, splits=splits).base == train.base and start.read == [], "each choice has an index"
    assert set(start(root, splits="none").classes) == {*names}
    with pytest.raises(BadInput, match=r"data .*no .*Holdin .*no .*Holdin\.txt"):
        start(root, "val", splits=f"{names[0]},Holdin")


@pytest.mark.parametrize("names, splits", [
    (["seg_test/seg_test/cat", "seg_test/seg_test/dog", "seg_train/seg_train/cat",
      "seg_train/seg_train/dog", "seg_pred/seg_pred"], "seg_train/seg_train,seg_test/seg_test"),
    (["a_train/cat", "a_train/dog", "a_test/cat", "a_test/dog"], "a_train,a_test"),
    (["one/cat", "one/dog", "two/cat", "two/dog"], "one,two"),
    (["cat/train", "cat/test", "dog/train", "dog/test"], ""),
    (["amazon/images/cat", "amazon/images/dog", "dslr/images/cat", "dslr/images/dog"],
     "amazon/images,dslr/images"),
    (["train/train/cat", "train/train/dog", "val/val/cat", "val/val/dog"], "train/train,val/val"),
    (["data/train/cat", "data/train/dog", "data/val/cat", "data/val/dog"], "data/train,data/val"),
])  # fmt: skip
def test_deeper_folders_are_named_by_an_option(tmp_path, start, names, splits):
    for name in names:
        write(tmp_path / "data", **{name: 2})
    with pytest.raises(BadInput, match="--splits TRAIN,VAL"):
        start(tmp_path / "data")
    if splits:
        train = start(tmp_path / "data", splits=splits)
        assert train.classes == ("cat", "dog")
        val = start(tmp_path / "data", "val", classes=train.classes, splits=splits)
        assert [train.base, val.base] == [f"{tmp_path}/data/{name}" for name in splits.split(",")]


def test_lists_in_a_folder_are_named_by_an_option(data, start):
    (data / "lists").mkdir()
    for split in ("train", "val"):
        lines = [f"./{split}/{name}/0.jpg {name}\n" for name in ("cat", "dog")]
        (data / "lists" / f"{split}.txt").write_text("".join(lines))
    train = start(data, splits="lists/train,lists/val")
    assert train.base == str(data) and train.find("train/dog/0.jpg") == 1, "the list begins its paths with ./"


def test_classes_with_subfolders_are_classes_by_an_option(tmp_path, start):
    root = tmp_path / "data"
    for number, name in enumerate(("cat", "dog")):
        write(root / name, images=2)
        write(root / "more" / name, **{str(number): 1})
    with pytest.raises(BadInput, match=r"cat/images/0\.jpg .*--splits none"):
        start(root)
    assert start(root, splits="none").classes == ("cat", "dog", "more")
    assert start(root, labelled=False).classes == ("cat", "dog", "more"), (
        "a restart of an earlier version's run"
    )
    (root / "dog").rename(root / "train")
    with pytest.raises(BadInput, match=r"data has train, .*no val .* --splits TRAIN,VAL .* --splits none"):
        start(root, "val")
    assert start(root, splits="none").classes == ("cat", "more", "train")


def test_class_names_are_compared_in_one_unicode_form(data, start):
    """macOS writes an accent as a character of its own."""
    for split, form in (("train", "NFC"), ("val", "NFD")):
        (data / split / "cat").rename(data / split / unicodedata.normalize(form, "zèbre"))
    train = start(data)
    assert train.classes == ("dog", unicodedata.normalize("NFC", "zèbre"))
    assert start(data, "val", classes=train.classes).labels.tolist() == [0, 1]
    write(data / "train", **{unicodedata.normalize("NFD", "zèbre"): 1})
    with pytest.raises(BadInput, match=r"'ze\\u0300bre'"):
        start(data)


def test_val_uses_the_numbers_of_train(data, start):
    shutil.rmtree(data / "val" / "cat")
    train = start(data)
    assert start(data, "val", classes=train.classes).labels.tolist() == [1]
    assert start(data, "val", classes=train.classes).classes == ("cat", "dog")
    write(data / "val", zebra=2)
    with pytest.raises(BadInput, match=r"val: 2 images .*class 'zebra', .*train .* 2 "):
        start(data, "val", classes=train.classes)


def test_a_folder_without_splits_is_divided_by_path(tmp_path, start, lines):
    """An image stays in its split if the folder moves, its extension changes, or the share grows."""
    root = write(tmp_path / "data", cat=30, dog=20)
    options = {"val_share": 0.2}
    train = start(root, **options)
    many = 50 - len(train)
    (line,) = lines
    assert re.match(rf"train={len(train)} test={many} .*{root} by path\b.* --val_share 20%$", line)
    val = start(root, "val", classes=train.classes, **options)
    assert lines == [] and len(val) == many and train.classes == val.classes == ("cat", "dog")
    assert sorted(names(train) + names(val)) == sorted(
        str(path.relative_to(root)) for path in root.glob("*/*")
    )
    numbers = {"cat": (16, 17, 20, 25, 6, 7), "dog": (13, 15, 4, 9)}
    expected = [f"{name}/{number}.jpg" for name, each in numbers.items() for number in each]
    assert names(val) == expected, "the split is the same on every machine"

    copy = shutil.copytree(root, tmp_path / "elsewhere" / "copy")
    assert start(copy, **options).fingerprint == train.fingerprint
    assert start(copy, "val", **options).fingerprint == val.fingerprint
    (copy / "cat" / "6.jpg").rename(copy / "cat" / "6.jpeg")
    assert start(copy, "val", **options).fingerprint == val.fingerprint
    write(copy, ape=40)
    with_apes = names(start(copy, "val", **options))
    expected[4] = "cat/6.jpeg"
    assert [name for name in with_apes if not name.startswith("ape/")] == expected, "classes are independent"
    assert set(names(val)) < set(names(start(root, "val", val_share=0.5)))
    assert start(root, val_share=0.5).fingerprint != train.fingerprint


def test_each_class_has_its_share_for_validation(tmp_path, start, lines):
    """Of the images of all classes together, two of the three smallest classes would have none."""
    counts = {"a": 13, "b": 13, "c": 14, "d": 25, "e": 2, "only": 1, "two": 2, "z": 1}
    root = write(tmp_path / "data", **counts)
    train = start(root, val_share=0.1)
    (line,) = lines
    assert re.match(f"train=63 test=8 .*{root} by path, --val_share 10%; no .*validation .*: only; z$", line)
    val = start(root, "val", classes=train.classes, val_share=0.1)
    assert np.bincount(val.labels, minlength=8).tolist() == [1, 1, 1, 3, 1, 0, 1, 0]
    assert np.bincount(train.labels, minlength=8).tolist() == [12, 12, 13, 22, 1, 1, 1, 1]


def test_an_image_that_is_added_or_removed_moves_at_most_one_other(tmp_path, start):
    root = write(tmp_path / "data", cat=30, dog=20)
    before = set(names(start(root, "val", val_share=0.1)))
    for number in range(30, 45):
        (root / "cat" / f"{number}.jpg").write_bytes(photo(number))
        after = set(names(start(root, "val", val_share=0.1)))
        moved = (before ^ after) - {f"cat/{number}.jpg"}
        assert len(moved) <= 1 and not any(name.startswith("dog") for name in moved)
        before = after


def test_images_of_one_name_stay_in_one_split(tmp_path, start):
    """a.jpg and a.png may be the same picture."""
    root = write(tmp_path / "data", cat=20, dog=2)
    for path in list((root / "cat").iterdir()):
        path.with_suffix(".png").write_bytes(photo(3, "PNG"))
    (root / "dog" / "1.jpg").rename(root / "dog" / "0.png")
    for share in (0.1, 0.12, 0.3, 0.5):  # 0.12 of 40 images would divide a pair
        val = names(start(root, "val", val_share=share))
        assert len({name.split(".")[0] for name in val if name[0] == "c"}) * 2 == len(val) - 1
        assert [name for name in val if name[0] == "d"] == ["dog/0.jpg"], "each class has one in both"


def test_a_split_by_path_of_few_images(tmp_path, start, lines):
    """Each class keeps an image for training, and at least one image is for validation if possible."""
    root = write(tmp_path / "data", cat=3, dog=1)
    for share in (1e-6, 0.999999):
        train, val = (start(root, split, val_share=share) for split in ("train", "val"))
        assert sorted(names(train) + names(val)) == ["cat/0.jpg", "cat/1.jpg", "cat/2.jpg", "dog/0.jpg"]
        assert set(train.labels) == {0, 1} and len(val) == (1 if share < 0.5 else 2)
    root = write(tmp_path / "single", cat=1, dog=1)
    assert len(start(root)) == 2
    (line,) = lines
    assert re.match(f"train=2 test=0 .*{root} by path, --val_share 10%: no .*validation, .*only one", line)
    with pytest.raises(BadInput, match=r"2 images, one .*each class: .*validation"):
        start(root, "val")


def test_images_without_class_folders(tmp_path, start, lines):
    root = write(tmp_path, train=3, val=2)
    (root / "train" / "notes").mkdir()
    (root / "train" / "notes" / "a.txt").touch()
    for folder, options in ((root / "train", {"val_share": 0}), (root, {}), (root, {"split": "val"})):
        with pytest.raises(BadInput, match=r"without a class folder: .*/CLASS/"):
            start(folder, **options)
    with pytest.raises(BadInput, match=r"one class, train: .*path,label"):
        (root / "val").rename(root / ".val")
        start(root, splits="none")
    (root / ".val").rename(root / "val")
    index = start(root / "train", val_share=0, labelled=False)
    assert index.classes == ("",) and names(index) == ["0.jpg", "1.jpg", "2.jpg"]
    with pytest.raises(BadInput, match=r"val: 2 images .*no class folder, .* 2 classes: cat; dog"):
        start(root, "val", classes=("cat", "dog"))


def test_other_files_are_counted(data, start, lines):
    (data / "train" / "cat" / "readme.txt").touch()
    (data / "train" / "cat" / ".hidden.jpg").touch()
    (data / "train" / ".cache").mkdir()
    (data / "train" / "loose.jpg").write_bytes(photo(1))
    assert len(start(data)) == 5
    for name in ("a.GIF", "b.gif", "c.heic"):
        (data / "train" / "dog" / name).touch()
    (data / "train" / "dog" / "@eaDir").mkdir()  # Synology's thumbnails
    (data / "train" / "dog" / "@eaDir" / "1.jpg").write_bytes(photo(3))
    assert len(start(data)) == 5
    found = "hidden 3, .gif 2, .txt 1, .heic 1, 1 images outside class folders"
    assert sorted(lines[0].partition("ignored ")[2].split(", ")) == sorted(found.split(", "))


def test_links(data, tmp_path, start):
    write(tmp_path / "elsewhere", zebra=2)
    (data / "train" / "zebra").symlink_to(tmp_path / "elsewhere" / "zebra")
    (data / "train" / "cat" / "9.jpg").symlink_to(tmp_path / "elsewhere" / "zebra" / "0.jpg")
    (data / "train" / "dog" / "up").symlink_to(data / "train")
    (data / "train" / "round").symlink_to(".")
    (tmp_path / "elsewhere" / "zebra" / "back").symlink_to(data / "train" / "zebra")
    index = start(data)
    assert index.classes == ("cat", "dog", "zebra") and names(index)[3:] == [
        "cat/9.jpg", "dog/0.jpg", "dog/1.jpg", "zebra/0.jpg", "zebra/1.jpg",
    ]  # fmt: skip
    (data / "train" / "cat" / "broken.jpg").symlink_to("nowhere")
    with pytest.raises(BadInput, match=r"1 of 9 files .*missing .*train: cat/broken\.jpg"):
        start(data)


def test_names_of_any_bytes(data, start, lines):
    for name in ("with space.jpg", "没有.jpg", os.fsdecode(b"latin\xe9.jpg"), "new\nline.jpg"):
        (data / "train" / "cat" / name).write_bytes(photo(5))
    index = start(data)
    assert len(index) == 9 and all(os.path.isfile(index.path(id)) for id in range(9))
    bad = data / "train" / "cat" / os.fsdecode(b"bad\xe9.jpg")
    bad.touch()
    (data / "train" / "cat" / "new\nline.jpg").write_bytes(b"")
    assert start(data, max_bad=0.5).excluded[0] == (str(bad), "is empty (0 bytes)")
    assert sorted(start.read) == sorted([os.path.relpath(bad, data), "train/cat/new\nline.jpg"])
    assert lines[1].endswith(
        "cat/bad\\udce9.jpg: is empty (0 bytes); " + f"{data}/train/cat/new line.jpg: is empty (0 bytes)"
    )


@pytest.mark.parametrize("numbers", [False, True])
def test_list(data, start, numbers):
    labels = ("0", "1") if numbers else ("cat", "dog")
    (data / "train" / "cat" / "a b.jpg").write_bytes(photo(6))
    for split, paths in {"train": ["dog/1.jpg", "cat/a b.jpg", "dog/0.jpg"], "val": ["dog/0.jpg"]}.items():
        lines = [f"{split}/{path}  {labels[path.startswith('dog')]}" for path in paths]
        (data / f"{split}.txt").write_text("\ufeff" + "\n".join(lines) + "\n\n", encoding="utf-8")
    train = start(data)
    assert names(train) == ["train/cat/a b.jpg", "train/dog/0.jpg", "train/dog/1.jpg"]
    assert train.classes == labels and train.labels.tolist() == [0, 1, 1]
    val = start(data, "val", classes=train.classes)
    assert names(val) == ["val/dog/0.jpg"] and val.labels.tolist() == [1]


@pytest.mark.parametrize("line, message", [
    ("val/0.jpg 1", r"'1', .* 2 classes: cat; dog; .* names"),  # from 0 or from 1?
    ("0.jpg dog", r"missing in .*data: 0\.jpg"),
])  # fmt: skip
def test_a_list_for_class_folders_has_their_names_and_paths_below_the_root(data, start, line, message):
    shutil.rmtree(data / "val")
    write(data, val=3)
    classes = start(data).classes
    (data / "val.txt").write_text("val/2.jpg dog\nval/0.jpg cat\n")
    val = start(data, "val", classes=classes)
    assert names(val) == ["val/0.jpg", "val/2.jpg"] and val.labels.tolist() == [0, 1]
    (data / "val.txt").write_text(f"{line}\n")
    with pytest.raises(BadInput, match=message):
        start(data, "val", classes=classes)


LISTS = {  # lines of cat/a 0.jpg, label 0, and dog/a 1.jpg, label 1
    "tabs, CRLF": b"cat/a 0.jpg\t0\r\ndog/a 1.jpg\t1\r\n",
    "a name with spaces": b"cat/a 0.jpg\tcat\ndog/a 1.jpg\ttabby dog",
    "quoted names": b'"cat/a 0.jpg" cat\n"dog/a 1.jpg"  "tabby dog"\n',
    "commas": b"cat/a 0.jpg, 0\ndog/a 1.jpg, 1\n",
    "quoted commas": b'"cat/a 0.jpg","0"\n"dog/a 1.jpg","1"\n',
    "semicolons": b"cat/a 0.jpg;0\ndog/a 1.jpg;1\n",
    "a header": b"path label\ncat/a 0.jpg 0\ndog/a 1.jpg 1\n",
    "a header, columns": b"id,Label,path,width\n7,0,cat/a 0.jpg,8\n9,1,dog/a 1.jpg,9\n",
    "two images, a header": b"mask,path,label\nm.png,cat/a 0.jpg,0\nn.png,dog/a 1.jpg,1\n",
    "UTF-16, a comment": "# of cats\ncat/a 0.jpg 0\n#\ndog/a 1.jpg 1\n".encode("utf-16"),
    "only CR, dots": b"./cat/a 0.jpg 0\r./dog/a 1.jpg 1\r",
    "absolute paths": b"ROOT/cat/a 0.jpg 0\nROOT/dog/a 1.jpg 1\n",
    "from 1": b"cat/a 0.jpg 1\ndog/a 1.jpg 2\n",
    "from 001": b"cat/a 0.jpg 001\ndog/a 1.jpg 002\n",
}


@pytest.mark.parametrize("form", LISTS)
def test_forms_of_lists(tmp_path, start, form):
    for name in ("cat/a 0.jpg", "dog/a 1.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(photo(1))
    (tmp_path / "train.txt").write_bytes(LISTS[form].replace(b"ROOT", os.fsencode(tmp_path)))
    index = start(tmp_path)
    assert [os.path.normpath(name) for name in names(index)] == ["cat/a 0.jpg", "dog/a 1.jpg"]
    assert index.labels.tolist() == [0, 1]
    assert index.classes in [("0", "1"), ("1", "2"), ("cat", "tabby dog")]
    (tmp_path / "train.txt").rename(tmp_path / "val.txt")
    assert start(tmp_path, "val", classes=index.classes).labels.tolist() == [0, 1]


@pytest.mark.parametrize("classes, label, place", [
    (("1", "2"), "0", "class '0', .* 1; 2"),  # one image only
    (("1", "2"), "002", 1),
    (("001", "002", "003"), "1", 0),  # class folders
    (("001", "002", "003"), "0", "class '0', .* 001; 002; 003"),
    (("1", "10", "2"), "10", 1),
    (("1", "10", "2"), "0", "class '0', .* 1; 10; 2"),
    (("01", "1"), "1", "different spellings: '01'"),
    (None, "0\nval/dog/0.jpg 5", r"class '5', .* 0; 1; .*0..N-1 .*1..N"),
    (None, "-1\nval/dog/0.jpg 1", "class '-1', .* 1; 2"),
    (None, "cat|pet\nval/dog/0.jpg dog", "several labels as 3,17"),
])  # fmt: skip
def test_numbers_in_a_list_are_those_of_the_train_split(data, start, classes, label, place):
    (data / "val.txt").write_text(f"val/cat/0.jpg {label}\n")
    if isinstance(place, int):
        assert start(data, "val", classes=classes).labels.tolist() == [place]
    else:
        with pytest.raises(BadInput, match=place):
            start(data, "val", classes=classes)


@pytest.mark.parametrize("text, message", [
    ("", r"val\.txt lists no image"),
    ("a.jpg 0\nb.jpg tabby dog\n", r"line 2: expected `path label`, .*quotes.*; found 'b\.jpg tabby dog'"),
    ("a.jpg 0 10 20\nb.jpg 1 10 20\n", r"line 1: expected `path label`.* found 'a\.jpg 0 10 20'"),
    ("0 a.jpg\n1 b.jpg\n", r"line 1: expected `path label`, .*; found '0 a\.jpg'"),
    ("a.jpg,0\nb.jpg,\n", r"line 2: expected `path,label`, .*; found 'b\.jpg,'"),
    ("a.jpg,0\nb.jpg,0,1\nc.jpg,1", r"line 2: expected `path,label`, .*; found 'b\.jpg,0,1'"),
    ("what,kind\na.jpg,0\nb.jpg,1\n", r"line 1: .* path and label; found 'what,kind'"),
    ("label,file\na.jpg,0\nb.jpg,1\n", r"line 1: .* path and label; found 'label,file'"),
    ("a.jpg,0,3\nb.jpg,1,3\n", r"line 1: .* columns .*header"),
    ("file,class,label\na.jpg,0,3\n", r"line 1: .* columns .*header .*path"),
    ('a.jpg,"3, 17"\nb.jpg,3\n', r"line 1: expected `path,label`.* several labels as 3,17"),
    ("a.jpg 3;17\nb.jpg 3\n", r"line 1: .* several labels as 3,17"),
    ("val/cat/0.jpg cat\n./val/cat/0.jpg dog\n", r"lists \./val/cat/0\.jpg twice, with labels "),
    ("./val/cat/0.jpg cat\nval/cat/0.jpg dog\n", r"lists val/cat/0\.jpg twice, with labels cat and dog"),
    (
        "val/cat/0.jpg 0\n\nval/dog/0.jpg\n",
        r"val\.txt, line 3: expected `path label`, .*; found 'val/dog/0\.jpg'",
    ),
    ("val/cat/0.jpg 0\nval/dog/0.jpg 1\n", r"val\.txt: 1 images belong to class '0', .* cat; dog; "),
    ("val/cat/0.jpg bird\n", r"val\.txt: 1 images belong to class 'bird'"),
    ("val/cat/0.jpg cat\nval/cat/0.jpg dog\n", r"lists val/cat/0\.jpg twice, with labels cat and dog"),
    (
        "".join(f"val/cat/{number}.jpg cat\n" for number in range(20)),
        r"19 of 20 files .*missing .*: val/cat/1\.jpg; val/cat/10\.jpg; .*18\.jpg; and 9 more$",
    ),
    (
        "val/cat/0.jpg 0\n\0\1\2 3\n",
        r"val\.txt, line 2: expected `path label`, .*; found '\\x00\\x01\\x02 3'$",
    ),
    (
        f"val/cat/0.jpg {'1' * 5000}\n",
        r"val\.txt, line 1: expected `path label`, .*; found 'val/cat/0\.jpg 1+'$",
    ),
    ("/etc/0.jpg 0\n", r"val\.txt, line 1: /etc/0\.jpg is not below .*val\.txt"),
    ("val/cat/0.jpg 0\nval/../../0.jpg 0\n", r"val\.txt, line 2: val/\.\./\.\./0\.jpg is not below"),
    ("val/cat cat\nval/dog/0.jpg dog\n", r"1 of 2 files .*missing .*: val/cat$"),
])  # fmt: skip
def test_lists_that_are_wrong(data, start, text, message):
    (data / "val.txt").write_text(text)
    with pytest.raises(BadInput, match=message):
        start(data, "val", classes=("cat", "dog"))


def test_nothing_to_learn_from(tmp_path, data, start):
    with pytest.raises(BadInput, match=r"data_url .*nowhere does not exist"):
        start(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"empty holds no image \(\.jpg \.jpeg"):
        start(tmp_path / "empty")
    (tmp_path / "texts" / "cat").mkdir(parents=True)
    (tmp_path / "texts" / "cat" / "a.txt").touch()
    with pytest.raises(BadInput, match=r"texts holds no image"):
        start(tmp_path / "texts")
    (data / "train" / "zebra").mkdir()
    (data / "train" / "ape").mkdir()
    with pytest.raises(BadInput, match=r"train: 2 .*folders .*no image: ape; zebra"):
        start(data)
    (data / "val" / "zebra").mkdir()
    assert len(start(data, "val", classes=("cat", "dog", "zebra"))) == 2, "a class may be missing in val"
    shutil.rmtree(data / "val")
    with pytest.raises(BadInput, match=r"data has train, .*no val .*validation .*test .*--splits TRAIN,VAL"):
        start(data, "val")
    (data / "train" / "zebra").rmdir()
    (data / "train" / "ape").rmdir()
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"cannot write .*index .*file/cache: Not a directory"):
        load(str(data), "train", str(tmp_path / "file" / "cache"))
    assert not (tmp_path / "cache" / "train").exists()


def kept(cache) -> list[str]:
    """Return the names in a cache folder except for the lock."""
    return sorted(name for name in os.listdir(cache) if not name.endswith(".lock"))


def test_added_removed_changed(data, start, lines):
    first = start(data)
    assert len(start.read) == 5 and start(data).folder == first.folder
    assert start.read == lines == [], "the second start reads nothing"
    (data / "train" / "cat" / "1.jpg").unlink()
    (data / "train" / "cat" / "00.jpg").write_bytes(photo(8))
    (data / "train" / "dog" / "5.jpg").write_bytes(photo(9))
    flipped = bytearray((data / "train" / "dog" / "0.jpg").read_bytes())
    flipped[len(flipped) // 2] ^= 1  # the size does not change
    (data / "train" / "dog" / "0.jpg").write_bytes(flipped)
    second = start(data)
    assert re.fullmatch(f"{data}/train: 3 of 6 files .*changed", "\n".join(lines))
    assert sorted(start.read) == ["train/cat/00.jpg", "train/dog/0.jpg", "train/dog/5.jpg"]
    assert second.widths.tolist() == [40, 48, 42, 50, 51, 49] and second.labels.tolist() == [0] * 3 + [1] * 3
    assert kept(os.path.dirname(first.folder)) == [os.path.basename(first.folder)]
    assert names(first)[1] == "cat/1.jpg" and first.widths[1] == 41, "an open old index can still be read"
    fresh = load(str(data), "train", str(data.parent / "another cache"))
    assert fresh.fingerprint == second.fingerprint != first.fingerprint
    for name in ("widths", "heights", "plain", "bytes", "crc32", "mtimes"):
        assert np.array_equal(getattr(fresh, name), getattr(second, name))


def test_another_class(data, start, lines):
    """No old file is read again, though the labels change."""
    start(data)
    write(data / "train", ape=1)
    index = start(data)
    assert start.read == ["train/ape/0.jpg"] and index.labels.tolist() == [0, 1, 1, 1, 2, 2]
    start(data, "val", classes=("cat", "dog"))
    val = start(data, "val", classes=index.classes)
    assert start.read == [] and val.labels.tolist() == [1, 2]
    assert re.fullmatch(f"{data}/val: 0 of 2 files .*changed", "\n".join(lines))


def test_fingerprint_is_that_of_the_data(data, tmp_path, start):
    first = start(data)
    shutil.copytree(data, tmp_path / "copy", copy_function=shutil.copyfile)  # with other mtimes
    copy = start(tmp_path / "copy")
    assert copy.fingerprint == first.fingerprint and copy.path(0).startswith(str(tmp_path / "copy"))
    changes = [
        lambda root: (root / "train" / "cat" / "0.jpg").rename(root / "train" / "cat" / "a.jpg"),
        lambda root: (root / "train" / "cat" / "0.jpg").rename(root / "train" / "dog" / "9.jpg"),
        lambda root: (root / "train" / "cat").rename(root / "train" / "bat"),
        lambda root: (root / "train" / "cat" / "0.jpg").unlink(),
        lambda root: (root / "train" / "cat" / "0.jpg").write_bytes(photo(0) + b"\0"),
        lambda root: [  # exchange two images
            (root / "train" / "cat" / f"{number}.jpg").write_bytes(photo(1 - number)) for number in (0, 1)
        ],
    ]
    fingerprints = {first.fingerprint}
    for number, change in enumerate(changes):
        root = tmp_path / str(number)
        shutil.copytree(data, root)
        change(root)
        fingerprints.add(start(root).fingerprint)
    assert len(fingerprints) == 1 + len(changes)


def test_fingerprints_are_those_of_older_versions(tmp_path, start):
    """They are in packs, checkpoints and receipts."""
    for name, size in (
        ("a b/x.1.ppm", 2),
        ("a b/deep/y.ppm", 3),
        ("c/.z/k.ppm", 80),
        ("c/x.jpg", 4),
        ("c/z", 5),
    ):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        content = bytes(number % 251 for number in range(3 * size * size))
        (tmp_path / "data" / name).write_bytes(b"P6 %d %d 255\n" % (size, size) + content)
    (tmp_path / "data" / "train.txt").write_text(
        "a b/x.1.ppm 0\na b/deep/y.ppm 1\nc/.z/k.ppm 1\nc/x.jpg 0\nc/z 1\n"
    )
    assert start(tmp_path / "data").fingerprint == "602474a71d0f6ea374d97705666b6e12"


def test_bad_images_are_refused_or_left_out(data, start, lines):
    (data / "train" / "cat" / "1.jpg").write_bytes(b"<html>404")
    (data / "train" / "dog" / "1.jpg").write_bytes(photo(11)[:-50])
    with pytest.raises(BadInput) as error:
        start(data)
    assert re.match(
        rf"2 of 5 images .*{data}/train .*bad: "
        rf"{data}/train/cat/1\.jpg: .*not .*format \(9 bytes\): .*b'<html>404'; "
        rf"{data}/train/dog/1\.jpg: .*cut .*\({len(photo(11)) - 50} bytes\): .*Premature end"
        r".* --max_bad_images 40%",
        str(error.value),
    )
    with pytest.raises(BadInput, match=r"2 of 5"):
        start(data, max_bad=0.39)
    assert start.read == [], "the second start reads nothing"
    index = start(data, max_bad=0.4)
    assert names(index) == ["cat/0.jpg", "cat/2.jpg", "dog/0.jpg"] and index.labels.tolist() == [0, 0, 1]
    assert [path for path, _ in index.excluded] == [
        f"{data}/train/{name}" for name in ("cat/1.jpg", "dog/1.jpg")
    ]
    assert start.read == [] and len(lines) == 1
    assert re.match(rf"skipped 2 bad of 5 images .*{data}/train: {data}/train/cat/1\.jpg: .*not ", lines[0])
    (data / "train" / "cat" / "1.jpg").write_bytes(photo(1))  # repair one file, damage another
    (data / "train" / "cat" / "2.jpg").write_bytes(b"")
    index = start(data, max_bad=0.4)
    assert re.match(f"{data}/train: 2 of 5 files .*changed$", lines[0]) and len(start.read) == 2
    assert names(index) == ["cat/0.jpg", "cat/1.jpg", "dog/0.jpg"]
    assert [reason.split()[1] for _, reason in index.excluded] == ["empty", "cut"]
    for name in ("cat/2.jpg", "dog/1.jpg"):  # without these files the data are the same
        (data / "train" / name).unlink()
    assert start(data).fingerprint == index.fingerprint
    assert re.fullmatch(f"{data}/train: 0 of 3 files .*changed", "\n".join(lines))


def test_a_file_that_does_not_fit_into_memory_is_bad(data, start):
    with open(data / "train" / "cat" / "1.jpg", "r+b") as file:
        file.truncate(10**12)  # takes no space
    index = start(data, max_bad=0.4)
    assert len(index) == 4 and "has 1000000000000 bytes" in index.excluded[0][1]


def test_many_bad_images(tmp_path, start):
    root = write(tmp_path / "data", cat=1, dog=0)
    for number in range(30):
        (root / "dog" / f"{number:02}.jpg").touch()
    with pytest.raises(BadInput) as error:
        start(root, val_share=0, labelled=False)
    text = str(error.value)
    assert text.startswith("30 of 31 images") and text.count("is empty") == 10 and "; and 20 more. " in text
    (root / "cat" / "0.jpg").write_bytes(b"")
    with pytest.raises(BadInput, match=r"all 31 images .*data .*bad"):
        start(root, max_bad=1.0, val_share=0, labelled=False)
    root = write(tmp_path / "many", cat=200)
    (root / "cat" / "7.jpg").write_bytes(b"")
    with pytest.raises(BadInput, match=r"^1 of 200 .* --max_bad_images 0\.5% skips them$"):
        start(root, val_share=0, labelled=False)
    assert len(start(root, max_bad=fraction("0.5%"), val_share=0, labelled=False)) == 199


@pytest.mark.thorough
def test_a_file_that_cannot_be_read_is_not_a_bad_image(data, start, monkeypatch):
    """It is never skipped. When it can be read, the others are not read again."""

    os_open = os.open

    def failing(path, *arguments, **options):
        if str(path).endswith("cat/1.jpg"):
            raise OSError(5, "Input/output error")
        return os_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", failing)
    for _ in range(2):
        with pytest.raises(BadInput, match=r"1 of 5 files .*cannot be read: cat/1\.jpg: Input/output error"):
            start(data, max_bad=1.0)
    monkeypatch.undo()
    index = start(data)
    assert len(index) == 5 and start.read == ["train/cat/1.jpg"]


def test_a_file_that_grows_is_not_believed(data, start, monkeypatch):
    path = data / "train" / "cat" / "1.jpg"
    fstat = os.fstat

    def grow(file):
        status = fstat(file)
        if os.path.samestat(status, os.stat(path)):
            path.write_bytes(photo(1) + b"more")
        return status

    monkeypatch.setattr(os, "fstat", grow)
    size = len(photo(1))
    with pytest.raises(BadInput, match=rf"1\.jpg: {size} bytes .*listed, more .*read$"):
        start(data)
    monkeypatch.undo()
    assert start(data).bytes[1] == len(photo(1)) + 4


def test_a_first_scan_refuses_what_is_not_a_file(data, start):
    (data / "train" / "cat" / "broken.jpg").symlink_to("nowhere")
    os.mkfifo(data / "train" / "dog" / "pipe.jpg")
    message = r"2 of 7 files .*cannot be read: cat/broken\.jpg: No such file.*; dog/pipe\.jpg: .*not a"
    with pytest.raises(BadInput, match=message):
        start(data, max_bad=1.0)


def write_column(index, **columns):
    """Change columns of an index and their checksums, and keep its fingerprint."""
    meta = json.loads(Path(index.folder, "index.json").read_text())
    for name, values in columns.items():
        values = np.asarray(values, getattr(index, name).dtype)
        np.save(Path(index.folder, f"{name}.npy"), values)
        meta["checksums"][name] = zlib.crc32(values)
    Path(index.folder, "index.json").write_text(json.dumps(meta))


@pytest.mark.parametrize("name", ["labels", "names", "crc32", "offsets"])
def test_an_index_with_other_columns_is_made_anew(data, start, lines, name):
    """Its checksums are right, and the fingerprint that it names is that of the listing."""
    first = start(data)
    changed = {
        "labels": 1 - first.labels,
        "names": np.frombuffer(first.names.tobytes().replace(b"cat/0", b"../xx"), np.uint8),
        "crc32": first.crc32 + 1,
        "offsets": [0, 1, *first.offsets[2:]],
    }
    write_column(first, **{name: changed[name]})
    second = start(data)
    assert second.labels.tolist() == [0, 0, 0, 1, 1] and names(second)[0] == "cat/0.jpg"
    assert len(start.read) == 5 and "fingerprint: scanning again" in lines[0]


def test_an_index_of_other_files_in_the_place_of_these_is_made_anew(data, tmp_path, start, lines):
    first = start(data)
    other = load(str(write(tmp_path / "other", a=3, b=2)), "train", str(tmp_path / "cache 2"), val_share=0)
    shutil.rmtree(first.folder)
    shutil.copytree(other.folder, first.folder)
    assert start(data).fingerprint == first.fingerprint and len(start.read) == 5
    assert re.fullmatch(f"{data}/train: 5 of 5 files .*changed", "\n".join(lines))


def test_an_index_of_version_0_25_is_current(data, start):
    """It has a digest of names, labels, sizes and times as its stamp, or "" if files could not be read."""
    path = Path(start(data).folder, "index.json")
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(meta | {"stamp": "e3b0c44298fc1c149afbf4c8996fb924"}))
    start(data)
    assert json.loads(path.read_text())["stamp"] != "complete" and start.read == []
    path.write_text(json.dumps(meta | {"stamp": ""}))
    start(data)
    assert json.loads(path.read_text())["stamp"] == "complete" and start.read == []


def test_fingerprints_leave_the_endings_of_all_names_out():
    draw = np.random.default_rng(0)
    for count in (0, 1, 1, 1, 300, 300):
        names = ["".join(draw.choice([*"a./"], draw.integers(1, 8))).encode() for _ in range(count)]
        columns = {name: np.arange(count) for name in ("labels", "bytes", "crc32")}
        stems = [os.path.splitext(name)[0] for name in names]
        digest = hashlib.blake2b(json.dumps([("a",), count]).encode(), digest_size=16)
        digest.update(np.array([*map(len, stems)], np.int64).tobytes() + b"".join(stems))
        digest.update(3 * np.arange(count).tobytes())
        columns["offsets"] = np.cumsum([0, *map(len, names)])
        columns["names"] = np.frombuffer(b"".join(names), np.uint8)
        assert image_folder._fingerprint(("a",), columns) == digest.hexdigest()


def test_an_index_of_another_user_is_not_used(data, start, lines, monkeypatch):
    """Each of its files counts. The user's own is made next to it, and is used later."""
    first, lstat = start(data), os.lstat
    strange = {os.path.join(first.folder, "labels.npy")}

    def owned(path):
        state = [*lstat(path)]
        state[stat.ST_UID] = os.geteuid() + 7 if path in strange else state[stat.ST_UID]
        return os.stat_result(state)

    monkeypatch.setattr(os, "lstat", owned)
    second = start(data)
    assert second.folder == f"{first.folder}-{os.geteuid()}" and second.fingerprint == first.fingerprint
    assert re.fullmatch(f"{first.folder} .*user {os.geteuid() + 7}: .*not used", "\n".join(lines))
    assert len(start.read) == 5 and start(data).folder == second.folder and start.read == []
    strange.add(second.folder)
    with pytest.raises(BadInput, match=rf"-{os.geteuid()} belongs to user .*, expected .*: .*another"):
        start(data)


DAMAGES = {  # name of a file of an index, and how its content changes
    "JSON that is cut": ("index.json", lambda content: content[:-100]),
    "deep JSON": ("index.json", lambda content: b"[" * 100_000),
    "older format": ("index.json", lambda content: content.replace(b'"format": ', b'"format": 9')),
    "cut column": ("widths.npy", lambda content: content[:-1]),
    "flipped bit": ("heights.npy", lambda content: content[:-1] + bytes([content[-1] ^ 64])),
    "other column": ("labels.npy", lambda content: content.replace(b"<i8", b"<i4")),
    "empty column": ("plain.npy", lambda content: b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_made_anew(data, start, lines, damage):
    first = start(data)
    fingerprint, folder = first.fingerprint, first.folder
    name, change = DAMAGES[damage]
    path = Path(folder) / name
    path.write_bytes(change(path.read_bytes()))
    if damage != "flipped bit":
        with pytest.raises(BadInput, match=r"index .*damaged"):
            open_index(folder)
    second = start(data)
    assert second.fingerprint == fingerprint and len(start.read) == 5
    assert len(lines) == 1 and "damaged" in lines[0] and lines[0].endswith(": scanning again")
    start(data)
    assert start.read == [] and lines == []


def test_pickle_is_its_folder(data, start):
    index = start(data)
    pickled = pickle.dumps(index)
    assert len(pickled) < 500
    assert names(pickle.loads(pickled)) == names(index)
    (data / "train" / "cat" / "0.jpg").unlink()
    start(data)
    with pytest.raises(BadInput, match=rf"{index.fingerprint} .*now .*changed"):
        pickle.loads(pickled)


SCAN = """
import sys, time
from datasets.folders import image_folder
inspect = image_folder._inspect
def slow(path, state):
    print(f"read {path}", flush=True)
    time.sleep(float(sys.argv[3]))
    return inspect(path, state)
image_folder._inspect = slow
index = image_folder.load(sys.argv[1], "train", sys.argv[2])
print("fingerprint", index.fingerprint, len(index), flush=True)
"""


def test_of_several_processes_one_scans(data, tmp_path, start):
    processes = [conftest.start("-c", SCAN, data, tmp_path / "cache", 0.1) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(len(output) for output in outputs) == [1, 6], outputs
    assert {output[-1] for output in outputs} == {f"fingerprint {start(data).fingerprint} 5"}
    assert start.read == []


class Killed(BaseException):
    pass


@pytest.mark.parametrize("last", [1, 9, "between the renames"])
def test_killed_while_the_index_is_written(data, tmp_path, start, monkeypatch, last):
    index = start(data)
    (data / "train" / "dog" / "1.jpg").unlink()
    flush, rename, done = image_folder._flush, os.rename, []

    def until(function, *arguments):
        function(*arguments)
        done.append(function)
        if len(done) == last or function is rename:
            raise Killed

    monkeypatch.setattr(image_folder, "_flush", functools.partial(until, flush))
    monkeypatch.setattr(os, "rename", functools.partial(until, rename))
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process deletes nothing
    with pytest.raises(Killed):
        start(data)
    monkeypatch.undo()
    cache = tmp_path / "cache"
    assert len(kept(cache)) == 2, "a part of the new index, and the old one"
    if last != "between the renames":
        assert len(open_index(index.folder)) == 5
    assert len(start(data)) == 4 and kept(cache) == [os.path.basename(index.folder)]


@pytest.mark.parametrize("parse, ends", [(fraction, {"0": 0, "1": 1, "100%": 1}), (val_share, {})])
def test_shares(parse, ends):
    for text, value in ({"0.1%": 0.001, "0.7%": 0.007, "10%": 0.1, "0.1": 0.1, "1e-3": 0.001} | ends).items():
        assert parse(text) == value and isinstance(parse(text), float)
    wrong = ["", "%", "-0.1", "-1%", "1.1", "10", "101%", "nan", "inf", "a tenth", "0.1%%", "1e999999"]
    for text in wrong + [end for end in ("0", "0%", "1", "100%") if not ends]:
        with pytest.raises(argparse.ArgumentTypeError, match="is not a share like"):
            parse(text)


@pytest.fixture
def large(data, start, monkeypatch):
    """Return the index of a data set of which a start compares the first and the last file only."""
    monkeypatch.setattr(image_folder, "_COMPARED", 2)
    return start(data)


def rewrite(path):
    """Change a byte of a file in place: its size and the time of its folder do not change."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace(path):
    """Replace a file by another one of the same size and mtime. Its ctime is another one."""
    before = path.stat()
    rewrite(path)
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # clocks of file systems are coarse
        os.utime(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_a_start_compares_a_part_of_the_times_and_all_names_of_a_large_data_set(data, start, large, lines):
    rewrite(data / "train" / "cat" / "1.jpg")
    assert start(data).fingerprint == large.fingerprint and start.read == lines == []
    (data / "train" / "cat" / "1.jpg").rename(data / "train" / "cat" / "9.jpg")
    assert start(data).fingerprint != large.fingerprint and start.read == ["train/cat/9.jpg"]
    rewrite(data / "train" / "cat" / "0.jpg")
    rewrite(data / "train" / "cat" / "2.jpg")
    start(data)
    assert sorted(start.read) == ["train/cat/0.jpg", "train/cat/2.jpg"], "one difference: all are compared"


@pytest.mark.parametrize("change", [rewrite, replace])
def test_a_read_finds_a_changed_file_and_the_next_start_compares_all(change, data, start, large, lines):
    path = data / "train" / "cat" / "1.jpg"
    if change is rewrite:
        os.utime(path, ns=(0, 0))
    assert FileStore(large).content(1) == path.read_bytes(), "only the time differs"
    assert start(data).folder == large.folder and start.read == []
    change(path)
    assert start(data).fingerprint == large.fingerprint and start.read == []
    with pytest.raises(BadInput, match=rf"^{path} .*changed since"):
        FileStore(pickle.loads(pickle.dumps(large))).content(1)
    second = start(data)
    assert start.read == ["train/cat/1.jpg"]
    assert re.fullmatch(f"{data}/train: 1 of 5 files .*changed", "\n".join(lines))
    assert second.fingerprint != large.fingerprint and FileStore(second).content(1) == path.read_bytes()
    assert start(data).folder == second.folder and start.read == lines == [], "it trusts the new index"


def test_an_image_that_is_replaced_by_one_of_the_same_size_and_mtime_is_read(data, start, lines):
    first = start(data)
    replace(data / "train" / "dog" / "0.jpg")
    second = start(data)
    assert start.read == ["train/dog/0.jpg"] and second.fingerprint != first.fingerprint
    assert start(data).fingerprint == second.fingerprint and start.read == []


def test_a_folder_that_is_copied_or_gets_other_permissions_is_not_read_again(data, start, lines):
    first = start(data)
    shutil.copytree(data, data.parent / "copy")  # with the times
    shutil.rmtree(data)
    (data.parent / "copy").rename(data)
    ctime = (data / "train" / "cat" / "0.jpg").stat().st_ctime_ns
    assert ctime != first.ctimes[0]
    second = start(data)
    assert start.read == lines == [] and second.fingerprint == first.fingerprint
    (data / "train" / "cat" / "9.jpg").write_bytes(photo(9))
    assert start(data).ctimes[0] == ctime and start.read == ["train/cat/9.jpg"]
    while (data / "train" / "cat" / "0.jpg").stat().st_ctime_ns == ctime:
        (data / "train" / "cat" / "0.jpg").chmod(0o600)
    start(data)
    assert start.read == ["train/cat/0.jpg"], "of one file: it is read, and not refused"
    assert start(data).fingerprint != first.fingerprint and start.read == []


def test_a_large_data_set_with_bad_images_is_current_until_one_is_repaired(data, start, lines, monkeypatch):
    monkeypatch.setattr(image_folder, "_COMPARED", 3)
    (data / "train" / "cat" / "2.jpg").write_bytes(b"")
    first = start(data, max_bad=0.2)
    assert start(data, max_bad=0.2).fingerprint == first.fingerprint and start.read == []
    (data / "train" / "cat" / "2.jpg").write_bytes(photo(2))
    assert len(start(data)) == 5 and start.read == ["train/cat/2.jpg"]
