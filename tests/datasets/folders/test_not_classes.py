"""Folders that are not classes are refused, with a way to use the table next to them; classes are not."""

import json
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


NOT_CLASSES = {
    "train_images test_images": "train_images and test_images .*names of splits",
    "Test_set Train_set": "Train_set and Test_set .*names of splits",
    "DIV2K_train_HR DIV2K_valid_HR": "DIV2K_train_HR and DIV2K_valid_HR .*names of splits",
    "train2017 val2017": "train2017 and val2017 .*names of splits",
    "trainA trainB testA testB": "trainA and testA .*names of splits",
    "tr va": "tr and va .*names of splits",
    "trainset testset": "trainset and testset .*names of splits",
    "training_data test_images": "training_data and test_images .*names of splits",
    "cats_train cats_test dogs_train dogs_test": "cats_train and cats_test .*names of splits",
    "Training PublicTest PrivateTest": "",
    "imagesTr labelsTr imagesTs": "imagesTr and imagesTs .*names of splits",
    "images masks": "images and masks .*images and their masks",
    "JPEGImages SegmentationClass SegmentationObject": "JPEGImages and SegmentationClass; SegmentationObj",
    "ISIC_Training_Input ISIC_Training_GroundTruth": "images and their masks",
    "HAM10000_images_part_1 HAM10000_images_part_2": "parts of one folder",
    "images_001 images_002 images_003": "parts of one folder",
    "fold1 fold2 fold3": "parts of one folder",
}


@pytest.mark.parametrize("names", NOT_CLASSES)
def test_names_of_folders_that_are_not_classes(tmp_path, load, names):
    root = make(tmp_path / "data", *names.split())
    if not NOT_CLASSES[names]:  # one of them is a split
        with pytest.raises(BadInput, match="images without a class folder"):
            load(root)
        return
    with pytest.raises(BadInput) as error:
        load(root)
    line = str(error.value)
    assert re.search(NOT_CLASSES[names], line) and "\n" not in line
    assert re.search(r"train\.txt and val\.txt, .*`\S+\.jpg LABEL`; .*classes, ", line)
    assert load(root, splits="none").classes == tuple(sorted(names.split()))


@pytest.mark.parametrize(
    "names",
    [
        "cats dogs",
        "test_tube images_of_x ape bat cat dog eel fox gnu hen",
        "bullet_train test_tube",
        "bullet_train steam_train",
        "face_mask no_mask",
        "with_mask without_mask",
        "label_0 label_1",
        "images_of_0 images_of_1 images_of_2",
        "class_0 class_1",
        "0 1 2",
        "s1 s2 s3",
        "A B C",
        "part_7 part_12",
        "photo sketch",
        "real fake",
        "training_shoes tennis_shoes",
        "evaluation_board dev_kit",
        "mask picture hat",
        "n01440764 n01443537",
        "猫_1 狗_1",
    ],
)
def test_names_of_classes(tmp_path, load, names):
    root = make(tmp_path / "data", *names.split())
    assert load(root).classes == tuple(sorted(names.split()))


def rows(root, *folders):
    return sorted(path for folder in folders for path in (root / folder).glob("*.jpg"))


TABLES = {  # name of a table -> its content, from the stems of three images
    "train.csv": lambda a, b, c: f"image_id,label\n{a}.jpg,3\n{b}.jpg,4\n{c}.jpg,3\n",
    "labels.tsv": lambda a, b, c: f"id\ttarget\n{a}\t3\n{b}\t4\n{c}\t3\n",
    "no header.csv": lambda a, b, c: f"{a}.jpg,3\n{b}.jpg,4\n{c}.jpg,3\n",
    "paths.csv": lambda a, b, c: f"n,file;x,category\n1,/in/{a}.jpg,3\n2,/in/{b}.jpg,4\n3,/in/{c}.jpg,3\n",
    "labels.json": lambda a, b, c: json.dumps({f"{a}.jpg": 3, f"{b}.jpg": 4, f"{c}.jpg": 3}),
    "rows.json": lambda a, b, c: json.dumps([{"file_name": f"{a}.jpg", "label": 3} for a in (a, b, c)]),
    "metadata.jsonl": lambda a, b, c: "\n".join(
        json.dumps({"file_name": f"{a}.jpg", "label": 3}) for a in (a, b, c)
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_named_with_a_line_that_works(tmp_path, load, name):
    root = make(tmp_path / "data", "train_images", "test_images")
    (root / name).write_text(TABLES[name]("a0", "a1", "a2"))
    with pytest.raises(BadInput) as error:
        load(root)
    line = str(error.value)
    assert re.search(f"splits: {name} .*3 images .*column ", line)
    assert "`train_images/a0.jpg,3` (guides/own_data.md" in line and "--splits none" in line
    (root / "train.txt").write_text("train_images/a0.jpg,3\ntrain_images/a1.jpg,4\n")
    with pytest.raises(BadInput, match=r"label 3 is not in 0\.\.1"):
        load(root)


def test_a_table_with_other_labels_than_the_folders(tmp_path, load):
    root = make(tmp_path / "data", "London", "Paris")
    assert load(root).classes == ("London", "Paris")
    table = root / "labels.csv"
    table.write_text("image,label\na0.jpg,cat\na1.jpg,dog\nb0.jpg,cat\nb1.jpg,dog\n")
    with pytest.raises(BadInput, match=r"London and Paris .*same label .*labels\.csv: "):
        load(root)
    assert len(load(root, splits="none")) > 0
    for content in (  # these agree with the folders, or do not say what the classes are
        "image,label\na0.jpg,0\na1.jpg,0\nb0.jpg,1\nb1.jpg,1\n",
        "image,label,city\na0.jpg,cat,x\na1.jpg,dog,x\nb0.jpg,cat,y\nb1.jpg,dog,y\n",
        "image,label\na0.jpg,tower\na1.jpg,bridge\nb0.jpg,arc\nb1.jpg,hill\n",
        "image,width,height\na0.jpg,40,32\na1.jpg,40,32\nb0.jpg,40,32\nb1.jpg,40,32\n",
        "id,age\n0,40\n1,41\n2,42\n",
        "image,label\nother0.jpg,cat\nother1.jpg,dog\n",
        "",
        "\0\1\2",
        '"',
    ):
        table.write_text(content)
        assert load(root).classes == ("London", "Paris"), content


def test_parts_of_one_folder_with_a_table(tmp_path, load):
    """Their names alone would be those of classes."""
    root = make(tmp_path / "data", "part_1", "part_2")
    assert len(load(root)) > 0
    (root / "meta.csv").write_text("image_id,dx,age\na0,nv,50\na1,mel,60\na2,nv,1\nb0,nv,50\nb1,mel,60\n")
    with pytest.raises(BadInput, match=r"part_1 and part_2 .*images of meta\.csv: .*/a0\.jpg,LABEL`"):
        load(root)


@pytest.mark.parametrize("folder", ["photos", "train", "."])
def test_one_folder_with_a_table(tmp_path, load, folder):
    root = make(tmp_path / "data", folder)
    (root / "train.csv").write_text("image_id,label\na0.jpg,x y\na1.jpg,z\na2.jpg,z\n")
    place = "photos/a0.jpg" if folder == "photos" else "a0.jpg"
    with pytest.raises(BadInput, match=rf'train\.csv .*3 images .*`{place},"x y"` \(guides'):
        load(root, val_share=0)


def test_images_in_tar_files(tmp_path):
    files = [
        (f"{folder}/{number}.jpg", b"x") for folder in ("train_images", "test_images") for number in "01"
    ]
    tars.write(tmp_path / "0.tar", files)
    with pytest.raises(BadInput, match=r"train_images and test_images .*names of splits"):
        image_folder.look(f"{tmp_path}/*.tar", "train", str(tmp_path / "cache"), None, print)


def test_the_guide_makes_the_lists(tmp_path, load):
    root = make(tmp_path / "data", "train_images", "test_images", count=10)
    content = "".join(f"a{number},{'cat' if number % 2 else 'dog'}\n" for number in range(10))
    (root / "train.csv").write_text(f"image_id,label\n{content}")
    guide = (ROOT / "guides" / "own_data.md").read_text(encoding="utf-8")
    code = re.search(r"### Labels in a CSV.*?```python\n(.*?)```", guide, re.DOTALL)[1]
    subprocess.run([sys.executable, "-c", code.replace("DATA", str(root))], check=True)
    train = load(root)
    val = load(root, "val", classes=train.classes)
    assert (len(train), len(val), train.classes) == (9, 1, ("cat", "dog"))
    assert {train.name(id).partition("/")[0] for id in range(9)} == {"train_images"}


def test_a_job_refuses_two_splits_next_to_a_csv(tmp_path):
    root = make(tmp_path / "data", "train_images", "test_images")
    (root / "train.csv").write_text("image_id,label\na0,0\na1,1\na2,0\n")
    result = run("jobs/imagenet.py", f"--data_url={root}", "--max_steps=1", "--batch_size=2", code=2)
    assert result.stderr.count("\n") == 1 and re.search(
        r"train\.csv .*3 images .*column image_id", result.stderr
    )
