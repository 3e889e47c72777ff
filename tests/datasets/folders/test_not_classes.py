"""Folders without splits that may be no classes are refused with the two forms; an option takes them."""

import re
import subprocess
import sys

import pytest

from bootfile.ground.errors import BadInput
from datasets.folders import image_folder
from tests.conftest import ROOT, run
from tests.support import pictures, tars


@pytest.fixture
def load(tmp_path):
    def call(root, split="train", **options):
        return image_folder.load(str(root), split, str(tmp_path / "cache"), log=lambda line: None, **options)

    return call


def make(root, *names, count=3):
    """Make folders of images, a0.jpg, a1.jpg, ... in the first one, and so on."""
    for number, name in enumerate(names):
        pictures.write(root / name, count, (40, 32), "jpg")
        for path in sorted((root / name).iterdir()):
            path.rename(path.with_name(f"{chr(97 + number)}{path.name}"))
    return root


@pytest.mark.parametrize("names", [
    # splits, masks and parts that earlier versions refused, too
    "train_images test_images",
    "Test_set Train_set",
    "DIV2K_train_HR DIV2K_valid_HR",
    "train2017 val2017",
    "trainA trainB testA testB",
    "tr va",
    "trainset testset",
    "training_data test_images",
    "cats_train cats_test dogs_train dogs_test",
    "Training PublicTest PrivateTest",
    "imagesTr labelsTr imagesTs",
    "images masks",
    "JPEGImages SegmentationClass SegmentationObject",
    "ISIC_Training_Input ISIC_Training_GroundTruth",
    "HAM10000_images_part_1 HAM10000_images_part_2",
    "images_001 images_002 images_003",
    "fold1 fold2 fold3",
    # classes that only their names could tell from these
    "test_tube bat cat",
    "with_mask without_mask",
    "label_0 label_1",
    "part_7 part_12",
])  # fmt: skip
def test_names_of_folders_that_may_be_no_classes(tmp_path, load, names):
    root = make(tmp_path / "data", *names.split())
    with pytest.raises(BadInput) as error:
        load(root)
    line = str(error.value)
    assert "\n" not in line and "train/CLASS/*" in line and "path,label" in line
    if "Training Public" in names:  # one of them is a split
        assert "images without a class folder" in line
        return
    assert "--splits none" in line
    assert load(root, splits="none").classes == tuple(sorted(names.split()))
    assert load(root, labelled=False).classes == tuple(sorted(names.split())), "a run that is continued"


@pytest.mark.parametrize(
    "names",
    ["cats dogs", "class_0 class_1", "0 1 2", "s1 s2 s3", "A B C", "photo sketch", "real fake",
     "tennis_shoes latest_trends", "constraint imagery", "n01440764 n01443537", "猫_1 狗_1"],
)  # fmt: skip
def test_names_of_classes(tmp_path, load, names):
    root = make(tmp_path / "data", *names.split())
    assert load(root).classes == tuple(sorted(names.split()))


@pytest.mark.parametrize("name", ["labels.csv", "train.TSV", "meta.json", "metadata.jsonl"])
def test_a_table_next_to_class_folders_may_have_other_labels(tmp_path, load, name):
    root = make(tmp_path / "data", "London", "Paris")
    assert load(root).classes == ("London", "Paris")
    (root / f".{name}").write_text("hidden")
    assert len(load(root)) > 0
    (root / name).write_text("image,label\na0.jpg,cat\na1.jpg,dog\nb0.jpg,cat\nb1.jpg,dog\n")
    with pytest.raises(BadInput, match=rf"{name} .*--splits none.*train\.txt"):
        load(root)
    assert len(load(root, splits="none")) > 0


@pytest.mark.parametrize("folder", ["photos", "train", "."])
def test_one_folder_has_no_classes(tmp_path, load, folder):
    """The command of the line makes a table; its labels are the user's."""
    root = make(tmp_path / "data", folder)
    for options in ({}, {"splits": "none"}):
        with pytest.raises(BadInput, match=r"class.* find .*train\.txt`") as error:
            load(root, val_share=0, **options)
    if folder != "train":
        command = re.search(r"`(\(cd .*train\.txt)`", str(error.value))[1]
        subprocess.run(command, shell=True, check=True)
        table = (root / "train.txt").read_text()
        (root / "train.txt").write_text(table.replace("a0.jpg,LABEL", "a0.jpg,OTHER"))
        index = load(root, splits="train,val")
        assert index.classes == ("LABEL", "OTHER") and sorted(index.labels.tolist()) == [0, 0, 1]


def test_images_in_tar_files(tmp_path):
    files = [
        (f"{folder}/{number}.jpg", b"x") for folder in ("train_images", "test_images") for number in "01"
    ]
    tars.write(tmp_path / "0.tar", files)
    with pytest.raises(BadInput, match=r"train_images may be splits.*--splits none"):
        image_folder.look(f"{tmp_path}/*.tar", "train", str(tmp_path / "cache"), None, print)


def test_the_guide_makes_the_lists(tmp_path, load):
    root = make(tmp_path / "data", "train_images", "test_images", count=10)
    content = "".join(f"a{number},{'cat' if number % 2 else 'dog'}\n" for number in range(10))
    (root / "train.csv").write_text(f"image_id,label\n{content}")
    subprocess.run([sys.executable, ROOT / "guides" / "own_data" / "csv_lists.py", root], check=True)
    train = load(root)
    val = load(root, "val", classes=train.classes)
    assert (len(train), len(val), train.classes) == (9, 1, ("cat", "dog"))
    assert {train.name(id).partition("/")[0] for id in range(9)} == {"train_images"}


def test_a_job_refuses_two_splits_and_prints_the_classes_that_it_takes(tmp_path):
    root = make(tmp_path / "data", "train_images", "test_images", count=4)
    (root / "train.csv").write_text("image_id,label\na0,0\na1,1\na2,0\n")
    arguments = ("jobs/imagenet.py", f"--data_url={root}", "--max_steps=1", "--batch_size=2")
    result = run(*arguments, code=2)
    assert result.stderr.count("\n") == 1 and "--splits none" in result.stderr
    (root / "train.csv").unlink()
    (root / "train_images").rename(root / "cat")
    (root / "test_images").rename(root / "dog")
    small = ("--arch=resnet18", "--image_size=32", "--warmup=0", f"--output_dir={tmp_path}/out")
    printed = run(*arguments, *small).stdout
    assert re.search(r"train: 6 images of 2 classes \(cat 3; dog 3\)", printed)
    assert re.search(r"val: 2 images of 2 classes \(cat 1; dog 1\)", printed)
