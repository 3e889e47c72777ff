"""`python -m launch predict` reaches the accuracy of the run, and reports unreadable images and bad input."""

import csv
import shutil

import pytest
from PIL import Image

from common.exits import BadInput
from datasets.memory import digits as digit_set
from launch.inference import predict
from tests.conftest import records, run


def _accuracy(path) -> float:
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return sum(row["class_1"] == row["path"].split("/")[0] for row in rows) / len(rows)


def test_the_accuracy_is_that_of_the_run(trained, tmp_path):
    output, data = trained
    said = [(line["val_acc"], line["epoch"]) for line in records(output) if "val_acc" in line]
    accuracy, epoch = next(each for each in said if 0.1 < each[0] < 1.0)  # others do not tell images apart
    result = run("-m", "launch", "predict", output / f"epoch_{epoch}.pth", data / "val", "--batch_size=33",
                 "--to", tmp_path / "all.csv")  # fmt: skip
    assert result.stdout == f"{tmp_path / 'all.csv'}: 160 images; resnet18, 10 classes\n"
    assert _accuracy(tmp_path / "all.csv") == accuracy
    with open(tmp_path / "all.csv", newline="") as file:
        row = next(csv.DictReader(file))
    probabilities = [float(row[f"probability_{rank}"]) for rank in range(1, 6)]
    assert probabilities == sorted(probabilities, reverse=True) and sum(probabilities) <= 1 + 1e-5


def test_unreadable_images_are_named(trained, tmp_path, capsys):
    output, data = trained
    shutil.copytree(data / "val" / "class_3", tmp_path / "class_3")
    victims = sorted((tmp_path / "class_3").iterdir())[:3]
    victims[0].write_bytes(b"<html>not found</html>")
    victims[1].write_bytes(b"")
    victims[2].unlink()
    victims[2].symlink_to("nowhere")
    target = tmp_path / "found.csv"
    assert predict.main([str(output), str(tmp_path / "class_3"), "--to", str(target)]) == 0
    assert "16 images, 3 of them unreadable; " in capsys.readouterr().out
    with open(target, newline="") as file:
        rows = {row["path"]: row for row in csv.DictReader(file)}
    assert "is text, not an image" in rows[victims[0].name]["error"]
    assert "is empty" in rows[victims[1].name]["error"] and "No such file" in rows[victims[2].name]["error"]
    assert all(bool(row["error"]) != bool(row["class_1"]) for row in rows.values()) and len(rows) == 16


def test_weights_of_train_py(digits, tmp_path):
    """The test set as PNG files (grey, 8 pixels) gives the accuracy of the run."""
    _, test = digit_set.load(None, custom_data=False)
    for number, (image, label) in enumerate(zip(test.images, test.labels.tolist(), strict=True)):
        path = tmp_path / "test" / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(path)
    predict.main([str(digits / "best.pth"), str(tmp_path / "test"), "--to", str(tmp_path / "found.csv")])
    assert _accuracy(tmp_path / "found.csv") == pytest.approx(records(digits)[-1]["val_acc"], abs=1e-12)


def test_what_is_refused(trained, tmp_path, capsys):
    output, data = trained
    shutil.copy(output / "best.pth", tmp_path / "alone.pth")
    (tmp_path / "mine.csv").write_text("mine")
    for arguments, message in (
        ((tmp_path / "alone.pth", data), "no starts.jsonl"),
        ((tmp_path / "alone.pth", data, "--arch=resnet50", "--image_size=32"), "belong to another network"),
        ((output / "best.pth", tmp_path), "contains no images"),
        (
            (output / "best.pth", data, "--to", tmp_path / "mine.csv"),
            "exists and was not made by this command",
        ),
    ):
        with pytest.raises(BadInput, match=message):
            predict.main([*map(str, arguments)])
    one = [tmp_path / "alone.pth", data / "val" / "class_1" / "000.jpg", "--arch=resnet18", "--image_size=32"]
    predict.main([*map(str, one), "--to", str(tmp_path / "one.csv")])
    assert ": 1 images; resnet18, 10 classes" in capsys.readouterr().out
