"""A link that leads nowhere is named, wherever a data set needs its target; nothing takes its place."""

import os
import shutil

import pytest

from bootfile.ground.errors import BadInput
from datasets.folders import image_folder, paired_images, tar_files
from tests.conftest import names, run
from tests.support import pictures, tars


@pytest.fixture
def data(tmp_path):
    for split, count in (("train", 3), ("val", 2)):
        for name in ("apple", "banana", "cherry"):
            pictures.write(tmp_path / "data" / split / name, count, (40, 32), "jpg")
    return tmp_path / "data"


@pytest.fixture
def load(tmp_path):
    """Return a function that indexes a split; `load.lines` is its log."""

    def call(root, split="train", **options):
        call.lines = []
        cache = str(tmp_path / "cache")
        return image_folder.load(str(root), split, cache, log=call.lines.append, **options)

    return call


def unmount(path):
    """Put a link to nothing into the place of a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    path.symlink_to("/mnt/disk/that/is/gone")


@pytest.mark.parametrize("name", [
    "train",
    "train/banana",
    "train/banana/deep",
    "train/banana.v2",
    "train/apple/0.jpg",
    "train/apple/more",
])  # fmt: skip
def test_a_link_to_nothing_is_refused(data, load, name):
    if not (data / name).exists():
        (data / name).mkdir()
    unmount(data / name)
    for _ in range(2):
        with pytest.raises(BadInput, match=rf"{data}/{name} .*link to /mnt/disk/\S+, .*not exist"):
            load(data)


def test_another_folder_does_not_take_the_place_of_a_split(data, load):
    shutil.copytree(data / "val", data / "test")
    unmount(data / "val")
    assert len(load(data)) == 9
    with pytest.raises(BadInput, match=rf"{data}/val .*link to .*not exist"):
        load(data, "val")


def test_folders_of_splits_that_are_named(data, load):
    (data / "photos").mkdir()
    (data / "photos" / "a").symlink_to(data / "train")
    assert len(load(data, splits="photos/a,val")) == 9
    unmount(data / "photos")
    with pytest.raises(BadInput, match=rf"{data}/photos .*link to .*not exist"):
        load(data, splits="photos/a,val")


def test_lists_and_their_files(data, load):
    (data / "photos").mkdir()
    (data / "photos" / "0.jpg").write_bytes((data / "train" / "apple" / "0.jpg").read_bytes())
    (data / "train.txt").write_text("photos/0.jpg 0\ntrain/apple/1.jpg 1\n")
    assert len(load(data)) == 2
    unmount(data / "photos")
    with pytest.raises(BadInput, match=rf"missing .*photos/0\.jpg; {data}/photos .*link to .*not exist"):
        load(data)
    unmount(data / "train.txt")
    with pytest.raises(BadInput, match=rf"{data}/train\.txt .*link to .*not exist"):
        load(data)


def test_a_link_to_itself_has_another_reason(data, load):
    (data / "train" / "date").symlink_to("date")
    with pytest.raises(BadInput, match=r"date .*link to date, .*\(Too many levels"):
        load(data)


def test_links_that_no_image_needs_are_left_out(data, load):
    index = load(data)
    (data / "notes").symlink_to("nowhere")
    (data / "train" / ".old").symlink_to("nowhere")
    assert load(data).fingerprint == index.fingerprint
    assert "ignored" in load.lines[0] and "hidden 1" in load.lines[0]
    (data / "train" / "readme.txt").symlink_to("nowhere")
    with pytest.raises(BadInput, match=r"readme\.txt .*link to nowhere"):
        load(data)


def test_the_folder_itself_and_a_part_of_its_path(data, load):
    data.rename(data.parent / "disk")
    data.symlink_to("disk")
    assert len(load(data)) == 9
    unmount(data)
    for path in (data, data / "deep" / "er"):
        with pytest.raises(BadInput, match=rf"data_url {data} .*link to .*not exist"):
            load(path)


@pytest.mark.parametrize("name", ["train", "train/sharp", "train/blurry/a", "train/sharp/0.jpg"])
def test_pairs(tmp_path, name):
    root = tmp_path / "data"
    for side in ("blurry", "sharp"):
        pictures.write(root / "train" / side, 2, (40, 32), "jpg")
        pictures.write(root / "train" / side / "a", 2, (40, 32), "jpg")
    paired_images.load(str(root), "train", str(tmp_path / "cache"))
    unmount(root / name)
    with pytest.raises(BadInput, match=rf"{root}/{name} .*link to .*not exist"):
        paired_images.load(str(root), "train", str(tmp_path / "cache"))


def test_tar_files(tmp_path):
    root = tmp_path / "shards"
    for name in ("0.tar", "1.tar", "part2/2.tar", "part2/deep/3.tar"):
        tars.write(root / name, [("a.jpg", b"x")])
    assert len(tar_files.find(f"{root}/**/*.tar")) == 4
    unmount(root / "part2" / "deep")
    for pattern in ("**/*.tar", "*/deep/*.tar"):
        with pytest.raises(BadInput, match=rf"{root}/part2/deep .*link to .*not exist"):
            tar_files.find(f"{root}/{pattern}")
    assert len(tar_files.find(f"{root}/part2/*.tar")) == 1
    unmount(root / "part2")
    with pytest.raises(BadInput, match=rf"{root}/part2 .*link to .*not exist"):
        tar_files.is_folder(str(root))
    unmount(root / "1.tar")
    with pytest.raises(BadInput, match=rf"cannot read {root}/1\.tar: .*1\.tar .*link to .*not exist"):
        tar_files.load_index(tar_files.find(f"{root}/*.tar"), tar_files.scan_tar, None)


def test_a_job_names_the_class_of_a_disk_that_is_not_mounted(data):
    unmount(data / "train" / "banana")
    result = run("jobs/imagenet.py", f"--data_url={data}", "--max_steps=1", "--batch_size=2", code=2)
    assert result.stderr.count("\n") == 1
    assert names(result.stderr, f"{data}/train/banana", "link to /mnt/disk/that/is/gone", "not exist")
    assert not os.path.exists("/mnt/disk")
