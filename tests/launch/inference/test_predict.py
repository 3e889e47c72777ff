"""`python -m launch predict` reaches the accuracy of the run, and reports unreadable images and bad input."""

import csv
import json
import os
import shutil
import socket

import numpy as np
import pytest
import torch
from PIL import Image

from bootfile.ground.errors import BadInput
from bootfile.records import STARTS, read_starts
from datasets.memory import digits as digit_set
from launch.inference import predict, predictions
from launch.inference.trained import Trained, load
from tests.conftest import names, records, run


def _read(path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _accuracy(path) -> float:
    rows = _read(path)
    return sum(row["class_1"] == row["path"].split("/")[0] for row in rows) / len(rows)


class Colour(torch.nn.Module):
    """A network whose logits are the means of the channels: the brightest one is the class."""

    def forward(self, images):
        means = images.mean(dim=(2, 3))
        return 8 * means if means.shape[1] == 3 else torch.cat([means, 1 - means], 1)


COLOURS = {"c/red": (255, 0, 0), "a/green": (0, 255, 0), "b/blue": (0, 0, 255), "b/zwhite": (255, 255, 255)}


def _of_colours(folder, monkeypatch, channels=3, share=1.0, **settings) -> Trained:
    """Write an image of each colour and one that cannot be read. Return the network that predict() loads."""
    for name, colour in COLOURS.items():
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.new("RGB", (16, 8), colour)
        image.paste((0, 0, 0), (0, 0, 2, 8))  # outside of the square in the centre
        image.save(path)
    (folder / "b/page.png").write_bytes(b"<html>")
    classes = ("red", "green", "blue")[: max(2, channels)]
    network = Trained(
        Colour(), "colour", channels, 4, (0.0,) * channels, (1.0,) * channels, share, classes, settings
    )
    monkeypatch.setattr(predictions.trained, "load", lambda *options: network)
    return network


def test_predictions_are_those_of_the_network_in_the_order_of_the_paths(tmp_path, monkeypatch, capsys):
    network = _of_colours(tmp_path / "images", monkeypatch)
    words = [str(tmp_path / "best.pth"), str(tmp_path / "images"), "--batch_size=2", "--enable_gpu=false"]
    assert predict.main([*words, "--to", str(tmp_path / "found.csv")]) == 0
    assert ": 5 images, 1 of them unreadable; colour, 3 classes" in capsys.readouterr().out
    rows = _read(tmp_path / "found.csv")
    assert [row["path"] for row in rows] == [
        "a/green.png",
        "b/blue.png",
        "b/page.png",
        "b/zwhite.png",
        "c/red.png",
    ]
    assert [bool(row["error"]) for row in rows] == [False, False, True, False, False]
    found = [(row["class_1"], row["number_1"], row["probability_1"]) for row in rows]
    likely = f"{1 / (1 + 2 * np.exp(-8)):.6f}"
    assert found[0] == ("green", "1", likely) and found[1] == ("blue", "2", likely)
    assert found[2] == ("", "", "") and found[4] == ("red", "0", likely)
    assert [rows[3][f"probability_{rank}"] for rank in (1, 2, 3)] == ["0.333333"] * 3
    assert {rows[4]["class_2"], rows[4]["class_3"]} == {"green", "blue"}
    assert predict.main([words[0], f"{words[1]}/b/blue.png", *words[2:]]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{likely} blue"
    with pytest.raises(BadInput, match=r"page.png: .*not a known image"):
        predict.main([words[0], f"{words[1]}/b/page.png", *words[2:]])
    root, paths = predictions.find_images(words[1])
    places = [torch.device("cpu")] * 3
    several = list(predictions.predict(network, root, paths, places, 1))
    assert [path for path, _, _ in several] == paths
    assert [int(shares.argmax()) for _, reason, shares in several if not reason][:2] == [1, 2]


def test_classes_of_bce_have_probabilities_of_their_own(tmp_path, monkeypatch):
    network = _of_colours(tmp_path, monkeypatch, loss="bce")
    [(_, _, shares)] = predictions.predict(network, str(tmp_path), ["b/zwhite.png"], [torch.device("cpu")])
    assert shares.tolist() == pytest.approx([1 / (1 + np.exp(-8))] * 3)


def test_a_network_of_one_channel_gets_grey_images(tmp_path, monkeypatch):
    network = _of_colours(tmp_path, monkeypatch, channels=1)
    paths = ["c/red.png", "a/green.png", "b/blue.png"]
    shares = [
        share for _, _, share in predictions.predict(network, str(tmp_path), paths, [torch.device("cpu")])
    ]
    brightness = [0.5 + torch.logit(share[0]).item() / 2 for share in shares]
    assert brightness == pytest.approx([0.299, 0.587, 0.114], abs=0.003)  # of 255 whole numbers


def test_the_share_of_an_image_is_its_centre(tmp_path, monkeypatch):
    network = _of_colours(tmp_path, monkeypatch, share=0.5)
    Image.open(tmp_path / "c/red.png").resize((8, 8)).save(tmp_path / "square.png")  # black on the left
    for share, is_pure in ((0.5, True), (1.0, False)):
        network = network._replace(share=share)
        [(_, _, shares)] = predictions.predict(network, str(tmp_path), ["square.png"], [torch.device("cpu")])
        assert (shares[0] > 0.999) == is_pure


@pytest.mark.thorough
def test_the_accuracy_is_that_of_the_run(trained, tmp_path):
    output, data = trained
    said = [(line["val_acc"], line["epoch"]) for line in records(output) if "val_acc" in line]
    accuracy, epoch = next(each for each in said if 0.1 < each[0] < 1.0)  # others do not tell images apart
    result = run("-m", "launch", "predict", output / f"epoch_{epoch}.pth", data / "val", "--batch_size=33",
                 "--to", tmp_path / "all.csv")  # fmt: skip
    assert result.stdout == f"{tmp_path / 'all.csv'}: 160 images; resnet18, 10 classes\n"
    assert _accuracy(tmp_path / "all.csv") == accuracy
    row = _read(tmp_path / "all.csv")[0]
    probabilities = [float(row[f"probability_{rank}"]) for rank in range(1, 6)]
    assert probabilities == sorted(probabilities, reverse=True) and sum(probabilities) <= 1 + 1e-5


@pytest.mark.thorough
def test_classes_that_pandas_does_not_read_as_text_have_numbers(trained, tmp_path):
    """The earlier columns stay, in their places."""
    output, data = trained
    shutil.copytree(output, tmp_path / "run")
    names = ["NA", "null", "None", "007", "1e3", "TRUE", "nan", "", "a,b", "N/A"]
    (tmp_path / "run" / "classes.json").write_text(json.dumps(names))
    predict.main([str(tmp_path / "run"), str(data / "val" / "class_3"), "--to", str(tmp_path / "all.csv")])
    rows = _read(tmp_path / "all.csv")
    before = ["path", "error"]
    for rank in range(1, 6):
        before += [f"class_{rank}", f"probability_{rank}"]
    assert [*rows[0]] == [*before, *(f"number_{rank}" for rank in range(1, 6))]
    for row in rows:
        for rank in range(1, 6):
            assert names[int(row[f"number_{rank}"])] == row[f"class_{rank}"]


@pytest.mark.thorough
def test_evaluations_of_another_size(trained, tmp_path):
    """--val_image_size 64 gives the figures of an evaluation with --image_size 64, and predict uses it."""
    output, data = trained
    job = (
        "jobs/imagenet.py",
        "--arch=resnet18",
        "--batch_size=32",
        "--data_backend=threads",
        f"--data_url={data}",
    )
    weights = f"--weights={output / 'best.pth'}"
    figures = [
        run(*job, "--evaluate", weights, *sizes).stdout.split("val_loss", 1)[1].splitlines()[0]
        for sizes in (("--image_size=32", "--val_image_size=64"), ("--image_size=64",), ("--image_size=32",))
    ]
    assert figures[0] == figures[1] != figures[2]
    short = (*job, weights, "--image_size=32", "--max_steps=1", "--warmup=0", "--lr=1e-9")
    run(*short, "--val_image_size=64", f"--output_dir={tmp_path}")
    assert (load(str(tmp_path)).size, load(str(tmp_path), image_size=32).size) == (64, 32)
    refused = run(*job, "--arch=vit_b_32", "--image_size=32", "--val_image_size=64", code=2).stderr
    assert names(refused, "--arch vit_b_32", "--image_size 32", "cannot take", "64 pixels")


@pytest.mark.thorough
def test_images_that_would_be_dark_are_refused(trained, tmp_path):
    """The training data with this scale were refused, or brighter."""
    output, _ = trained
    path = tmp_path / "images" / "a.png"
    path.parent.mkdir()
    job = [str(output), str(path.parent), "--to", str(tmp_path / "all.csv")]
    for top in (4095, 65535):
        Image.fromarray(np.linspace(0, top, 1600).reshape(40, 40).astype(np.uint16)).save(path)
        if top == 65535:
            predict.main(job)
        else:
            with pytest.raises(BadInput, match="no value above 4095 of 65535"):
                predict.main(job)
        assert os.path.exists(tmp_path / "all.csv") == (top == 65535)


@pytest.mark.thorough
def test_one_image_is_printed(trained, tmp_path, capsys, monkeypatch):
    output, data = trained
    monkeypatch.chdir(tmp_path)
    predict.main([str(output), str(data / "val" / "class_3"), "--to", "all.csv"])
    row = _read("all.csv")[0]
    capsys.readouterr()
    assert predict.main([str(output), str(data / "val" / "class_3" / row["path"])]) == 0
    printed = [line.split(" ") for line in capsys.readouterr().out.splitlines()]
    assert [name for _, name in printed] == [row[f"class_{rank}"] for rank in range(1, 6)]
    shares = [float(row[f"probability_{rank}"]) for rank in range(1, 6)]
    assert [float(share) for share, _ in printed] == pytest.approx(shares, abs=1e-5)
    assert os.listdir() == ["all.csv"]
    (tmp_path / "page.jpg").write_bytes(b"<html>")
    with pytest.raises(BadInput, match=r"page.jpg: .*not a known image"):
        predict.main([str(output), "page.jpg"])


@pytest.mark.thorough
def test_several_devices_give_the_same_predictions_in_the_same_order(trained):
    output, data = trained
    network = load(str(output))
    root, paths = predictions.find_images(str(data / "val"))
    one, three = (
        list(predictions.predict(network, root, paths, [torch.device("cpu")] * count, 33)) for count in (1, 3)
    )
    assert [path for path, _, _ in three] == [path for path, _, _ in one] == paths
    assert all(torch.equal(mine[2], other[2]) for mine, other in zip(one, three, strict=True))


OWN = """
import torch, parts

def build():
    pool = torch.nn.AdaptiveAvgPool2d(parts.SIDE)
    return torch.nn.Sequential(pool, torch.nn.Flatten(), torch.nn.Linear(12, 3))

def wrong():
    return torch.nn.Identity()

def leave():
    raise SystemExit(0)
"""


@pytest.mark.thorough
def test_weights_of_a_job_of_your_own(trained, tmp_path, capsys):
    """The function may import modules next to its file."""
    (tmp_path / "model.py").write_text(OWN)
    (tmp_path / "parts.py").write_text("SIDE = 2")
    network = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity(), torch.nn.Linear(12, 3))
    torch.save(network.state_dict(), tmp_path / "best.pth")
    settings = {"arch": ["mine"], "width": "wide"}
    start = {"step": 0, "settings": settings, "environment": {"job": "own.py"}, "time": 1.0}
    (tmp_path / "classes.json").write_text('["a", "b", "c"]')
    command = [str(tmp_path), str(trained[1] / "val"), "--to", str(tmp_path / "found.csv")]
    model = f"--model={tmp_path}/model.py"
    for settings, option, message in (
        ({}, (), r"no network: .*--arch .*--image_size, .*--model FILE.py:FUNCTION"),
        (start["settings"], (f"{model}:build2",), "KeyError: 'build2'"),
        (start["settings"], (f"{model}:wrong",), r"too many values to unpack .*logits \[1, classes\]"),
        (start["settings"], (f"{model}:leave",), "SystemExit: 0"),
        (start["settings"], ("--model=build",), r"--model build with .*expected FILE.py:FUNCTION"),
    ):
        (tmp_path / STARTS).write_text(json.dumps(start | {"settings": settings}) + "\n")
        with pytest.raises(BadInput, match=message):
            predict.main([*command, *option])
    sizes = {"settings": {"image_size": 32, "val_image_size": 48}}
    (tmp_path / STARTS).write_text(json.dumps(start | sizes) + "\n")
    assert load(str(tmp_path), model=f"{tmp_path}/model.py:build").size == 48
    assert predict.main([*command, f"{model}:build", "--image_size=32"]) == 0
    assert ": 160 images; " in capsys.readouterr().out
    rows = _read(tmp_path / "found.csv")
    assert {row["class_1"] for row in rows} <= {"a", "b", "c"} and len(rows) == 160


@pytest.mark.thorough
def test_unreadable_images_are_named(trained, tmp_path, capsys):
    output, data = trained
    shutil.copytree(data / "val" / "class_3", tmp_path / "class_3")
    victims = sorted((tmp_path / "class_3").iterdir())[:5]
    victims[0].write_bytes(b"<html>not found</html>")
    victims[1].write_bytes(b"")
    victims[2].unlink()
    victims[2].symlink_to("nowhere")
    with open(victims[3], "r+b") as file:
        file.truncate(10**12)  # takes no space
    os.mkfifo(tmp_path / "fifo")
    victims[4].unlink()
    victims[4].symlink_to(tmp_path / "fifo")
    target = tmp_path / "found.csv"
    assert predict.main([str(output), str(tmp_path / "class_3"), "--to", str(target)]) == 0
    assert "16 images, 5 of them unreadable; " in capsys.readouterr().out
    rows = {row["path"]: row for row in _read(target)}
    reasons = (
        "not a known image", "is empty", "No such file", "has 1000000000000 bytes", "not a regular file",
    )  # fmt: skip
    assert all(part in rows[path.name]["error"] for path, part in zip(victims, reasons, strict=True))
    assert (
        all(bool(row["error"]) != bool(row["class_1"]) == bool(row["number_1"]) for row in rows.values())
        and len(rows) == 16
    )


def test_weights_of_train_py(digits, tmp_path):
    """The test set as PNG files (grey, 8 pixels) gives the accuracy of the run."""
    _, test = digit_set.load(None, custom_data=False)
    for number, (image, label) in enumerate(zip(test.images, test.labels.tolist(), strict=True)):
        path = tmp_path / "test" / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(path)
    predict.main([str(digits / "best.pth"), str(tmp_path / "test"), "--to", str(tmp_path / "found.csv")])
    assert _accuracy(tmp_path / "found.csv") == pytest.approx(records(digits)[-1]["val_acc"], abs=1e-12)


SETTINGS = {
    "arch": ["timm:hf_hub:a/model", "timm:hf-hub:a/model", "timm:local-dir:/tmp", "timm:a/model",
             "fcn_resnet50", "raft_large", "quantized_resnet50", ["resnet18"], 3, "x" * 10**5, "\x1b[31m"],
    "image_size": ["x", 0.5, -1, 0, [32], {}, True, 10**6, 10**300, float("nan"), float("inf")],
    "width": ["x", 8.5, -1, 0, [8], {}, True, 10**6, 10**300],
    "amp": ["maybe", [1], 2, float("nan")],
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("option", SETTINGS)
def test_options_of_a_file_are_checked_as_those_of_a_command(digits, trained, tmp_path, option, monkeypatch):
    """The folder of a run may be another user's. No network is asked for what it names."""
    pytest.importorskip("timm")
    asked, resolve = [], socket.getaddrinfo

    def note(host, *arguments, **options):
        if host == "127.0.0.1":  # a thread that another test has left
            return resolve(host, *arguments, **options)
        asked.append(host)

    monkeypatch.setattr(socket, "getaddrinfo", note)
    source = digits if option == "width" else trained[0]
    shutil.copy(source / "best.pth", tmp_path / "best.pth")
    for value in SETTINGS[option]:
        start = read_starts(str(source))[-1]
        start["settings"][option] = value
        (tmp_path / STARTS).write_text(json.dumps(start) + "\n")
        with pytest.raises(BadInput) as refused:
            predict.main([str(tmp_path), str(trained[1]), "--to", str(tmp_path / "found.csv")])
        assert option in str(refused.value) and len(str(refused.value)) < 1000
    assert not asked and not (tmp_path / "found.csv").exists()


def test_heads_that_give_no_number_of_classes(digits, tmp_path):
    shutil.copy(digits / STARTS, tmp_path)
    state = torch.load(digits / "best.pth", weights_only=True)
    for head in (torch.tensor(1.0), torch.zeros(0, 64), torch.zeros(10**9, 0), torch.zeros(3, 4, 5)):
        torch.save(state | {"dense_layer.weight": head}, tmp_path / "best.pth")
        with pytest.raises(BadInput, match=r"of another network|different shape"):
            load(str(tmp_path))


@pytest.mark.thorough
def test_what_is_refused(trained, tmp_path, capsys):
    output, data = trained
    shutil.copy(output / "best.pth", tmp_path / "alone.pth")
    (tmp_path / "mine.csv").write_text("mine")
    for arguments, message in (
        ((tmp_path / "alone.pth", data), "starts.jsonl .*no network"),
        ((tmp_path / "alone.pth", data, "--arch=resnet50", "--image_size=32"), "belong to another network"),
        ((output / "best.pth", tmp_path), "contains no images"),
        ((output / "best.pth", data, "--to", tmp_path / "mine.csv"), "mine.csv .*not made by"),
    ):
        with pytest.raises(BadInput, match=message):
            predict.main([*map(str, arguments)])
    one = [tmp_path / "alone.pth", data / "val" / "class_1" / "000.jpg", "--arch=resnet18", "--image_size=32"]
    predict.main([*map(str, one), "--to", str(tmp_path / "one.csv")])
    assert ": 1 images; resnet18, 10 classes" in capsys.readouterr().out
