"""The measuring programs start, print their tables, and delete the outputs of the jobs."""

import csv
import json
import re
import sys

import pytest
import torch

from bootfile.ground.errors import BadInput
from datasets.folders import random_folder
from datasets.loaders import backends
from datasets.memory import cifar10
from tests.benchmarks import blocks, compare, generated, loaders, pairs, rounds, time_to_accuracy, train
from tests.conftest import ROOT, environment, run

TRAIN = ("-m", "tests.benchmarks.train", "--rounds=1", "--report_every=1", "--batch_size=8", "--timeout=100")
TIME = ("-m", "tests.benchmarks.time_to_accuracy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_folder.make(str(tmp_path_factory.mktemp("data") / "images"))


@pytest.mark.thorough
def test_the_loop_of_the_sample(tmp_path):
    printed = run(*TRAIN, "--jobs=seed loop", env=environment(TMPDIR=str(tmp_path)), timeout=300).stdout
    assert re.search(r"^seed loop +\S+ \(\S+\) +1\.00x ", printed.splitlines()[-1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments, message", [
    (("-m", "tests.benchmarks.train", "--jobs=speed"), "'speed' is not one of seed loop, train.py"),
    ((*TIME, "--jobs=train_none.py"), "'train_none.py', expected some of seed loop, train.py"),
    ((*TIME, "--target=98"), "--target 98 is not an accuracy"),
])  # fmt: skip
def test_bad_input(arguments, message):
    assert message in run(*arguments, code=2).stderr


@pytest.mark.thorough
def test_time_to_accuracy(tmp_path):
    stored = tmp_path / "runs.json"
    options = ("--jobs=seed loop", "--seeds=1", "--limit=600", "--target=0.05", f"--json={stored}")
    printed = run(*TIME, *options).stdout
    (loop,) = json.loads(stored.read_text())["runs"]
    assert loop["seconds_to_target"] == loop["curve"][0][0] and len(loop["curve"]) == 1  # ends at the target
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in printed.splitlines()}
    assert rows["seed loop"][1] == "1 of 1" and rows["seed loop"][5] == "1.00x |"


@pytest.mark.thorough
def test_growth():
    printed = run("-m", "tests.benchmarks.growth", "--steps=2000", "--processes=2", "--rounds=1").stdout
    assert "2000 steps: receipt.bin 0.06 MB" in printed and "2000 steps: metrics.jsonl 0." in printed
    assert re.search(r"^2000 steps, launch report RUN RUN: \d\.\d+", printed, re.MULTILINE)
    assert re.search(r"^2 processes until the end of step 3: \d+\.\d CPU s, \d\.\d+ GB$", printed, re.M)
    assert printed.count(" ms a step, ") == 2


@pytest.mark.thorough
def test_the_step_of_an_own_loop(tmp_path):
    stored = tmp_path / "figures.json"
    options = ("--steps=20", "--rounds=1", f"--json={stored}")
    printed = run("-m", "tests.benchmarks.own_step", *options).stdout
    assert re.search(r"^map_style_loader \+ Exact: -?\d+ us more \(\S+\), n=1$", printed, re.MULTILINE)
    [figure] = json.loads(stored.read_text())["figures"]
    assert len(figure["rounds"]) == 5 and all(value > 0 for [value] in figure["rounds"].values())


def test_regions_without_their_package(tmp_path):
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia" / "__init__.py").touch()
    folders = f"{tmp_path}:{ROOT}"
    printed = run("-m", "tests.benchmarks.regions", code=2, env=environment(PYTHONPATH=folders))
    assert "this benchmark needs nvidia-nvimgcodec-cu12" in printed.stderr


@pytest.mark.thorough
def test_backends_of_imagenet(folder, tmp_path):
    names = ["pytorch", "threads" if backends.reasons(torch.device("cpu"))["dali"] else "dali"]
    options = (
        "--arch=shufflenet_v2_x0_5",
        f"--data_url={folder}",
        f"--cache_dir={tmp_path}",
        "--image_size=32",
    )
    command = (*TRAIN, *options, f"--jobs={','.join(names)}", "--json", "--", "--workers=1")
    rows = json.loads(run(*command, timeout=300).stdout)["rows"]
    assert [row["name"] for row in rows] == names and rows[0]["ratio"] == [1]
    for row in rows:
        assert row["images_per_s"][0] > 0 and 0 <= row["waiting"] < 1 and row["start_s"] > 0


def test_generated_images_of_cifar_10_are_read(tmp_path):
    train, test = cifar10.load(generated.cifar_folder(str(tmp_path), 10), custom_data=False)
    assert (len(train), len(test)) == (100, 20)
    assert train.labels.bincount().tolist() == [10] * 10


def test_on_a_gpu_an_epoch_is_longer_than_a_report(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train"])
    monkeypatch.setattr(random_folder, "make", lambda folder, write: folder)
    args, gpu = train._parse_args(), torch.device("cuda")
    train._complete(args, gpu)
    assert args.report_every * args.batch_size < 50_000 / 2
    for command in train._small(args, gpu).values():
        assert command[command.index("--data_url") + 1].endswith("generated-cifar10-5000")
    monkeypatch.setattr(blocks, "_GPU", True)
    words = blocks._arguments(blocks._parsed())
    assert any(word.startswith("--data_url=") and word.endswith("-5000") for word in words)


def test_a_run_against_the_clock_saves_once():
    for name, epochs in (("digits", 8), ("cifar10", 16)):
        options = time_to_accuracy.RECIPES[name][2]["train_fast.py"]
        assert f"--epochs {epochs} " in options and f"--save_every {epochs}epochs" in options
    assert "--epoch_weights false" in options


def test_a_batch_size_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert "no GPU found" in run("-m", "tests.benchmarks.batch_size", code=2).stderr


@pytest.mark.thorough
def test_memory_of_a_rank_falls_as_its_shard():
    printed = run("-m", "tests.benchmarks.fsdp_memory", "--layers=4", "--processes=1,2").stdout
    rows = [
        [float(cell) for cell in row.strip("| ").split("|")] for row in re.findall(r"^\| \d.*", printed, re.M)
    ]
    (one, _, state, after, _), (two, _, half, after_two, peak) = rows
    assert (one, two, half) == (1, 2, state / 2) and after_two < after - state / 4 and peak < after


@pytest.mark.thorough
def test_pace():
    small = ("--processes=2", "--steps=20", "--rounds=1", "--milliseconds=1")
    printed = run("-m", "tests.benchmarks.pace", *small).stdout
    assert re.search(r"^ratio: \d\.\d{4} \(", printed, re.MULTILINE)


@pytest.mark.thorough
def test_exact():
    small = ("--width=2", "--batch_size=8", "--shards=4", "--rounds=1")
    printed = run("-m", "tests.benchmarks.exact", *small).stdout
    assert "| a step of 8 samples | s |" in printed and printed.count(", n=1 |") == 3


def test_forked_processes_meet():
    printed = run("-m", "tests.benchmarks.rendezvous", "--processes", "2", "4", "--timeout=60").stdout
    two, four = [row.strip("| ").split(" | ") for row in re.findall(r"^\| \d.*", printed, re.M)]
    assert (two[0], four[0]) == ("2", "4") and 20 < int(two[3]) < 100 and int(four[3]) > int(two[3])


@pytest.mark.parametrize("ending", [".jpg", ".JPEG"])
@pytest.mark.thorough
def test_the_loaders_of_tars_take_the_names_of_imagenet(ending, tmp_path):
    for number in range(256):
        image = tmp_path / "source/train" / f"n{number % 2}" / f"n_{number}{ending}"
        image.parent.mkdir(parents=True, exist_ok=True)
        next(loaders.pictures((60, 50), 1, number)).save(image, "JPEG")
    loaders.link_images(str(tmp_path / "images"), str(tmp_path / "source"), 128)
    row = loaders.Tars(str(tmp_path), 128)
    assert [loaders.describe_batch(images)[0] for images in row.batches()] == [64, 64]


@pytest.mark.thorough
def test_waste():
    small = ("--kills=1", "--epoch=8", "--milliseconds=20", "--ways=a rank")
    printed = run("-m", "tests.benchmarks.waste", *small).stdout
    row = r"^\| a rank \| [01] \([01]-[01]\) \| \d+ \(\d+-\d+\) \|$"
    assert re.search(row, printed, re.MULTILINE), printed


def test_a_record_is_compared_with_another(tmp_path, monkeypatch):
    paths = []
    for number, speeds in enumerate(([9.0, 10.0, 11.0], [9.5, 10.5, 10.0], [19.0, 20.0, 21.0])):
        record = rounds.Record()
        record.add("images", "images/CPU s", {"torchvision": [5.0] * 3, "pack": speeds, "other": [1.0] * 3})
        paths.append(tmp_path / f"{number}.json")
        record.write(str(paths[-1]))
    content = json.loads(paths[0].read_text())
    assert content["figures"][0]["rounds"]["pack"] == [9.0, 10.0, 11.0] and content["machine"]
    assert compare.compare(content, compare.read(str(paths[1]))) == 0
    assert compare.compare(content, compare.read(str(paths[2]))) == 1
    paths[0].write_text("{}")
    with pytest.raises(BadInput, match=r"0\.json is not a record"):
        compare.read(str(paths[0]))


def test_the_records_of_the_page_can_be_read():
    records = sorted((ROOT / "tests" / "benchmarks" / "records").glob("*.json"))
    assert records
    for path in records:
        record = compare.read(str(path))
        assert compare.compare(record, record) == 0 and path.stat().st_size < 20_000
        assert record["date"] and record["machine"] and record["flags"] and record["load_at_begin"]


def test_pairs_of_unequal_work_say_so():
    def answer(stores, output, size):
        return {"side": {"stores": stores, "output": output, "kernel": ""}, "bytes": size}

    ours = answer("short side 256, 26 KB an image", "float32 NCHW", 26)
    assert not pairs.list_differences([ours, answer("short side 256, 27 KB an image", "float32 NCHW", 27)])
    other = answer("as the files, 52 KB an image", "uint8 NCHW", 52)
    assert pairs.list_differences([ours, other]) == "stored pixels, stored bytes, output"


def test_a_folder_of_few_images_is_linked_several_times(tmp_path):
    for number in range(6):
        image = tmp_path / "own" / f"class{number % 2}" / f"{number}.jpg"
        image.parent.mkdir(parents=True, exist_ok=True)
        next(loaders.pictures((60, 50), 1, number)).save(image, "JPEG")
    described = loaders.link_images(str(tmp_path / "images"), str(tmp_path / "own"), 16)
    assert "6 of them different" in described
    assert len(list((tmp_path / "images" / "train").glob("*/*.jpg"))) == 16
    with pytest.raises(BadInput, match=r"--data_url .*none: no such folder"):
        loaders.link_images(str(tmp_path / "images"), str(tmp_path / "none"), 16)
    with pytest.raises(BadInput, match="JPEGs in at least two folders"):
        loaders.link_images(str(tmp_path / "images"), str(tmp_path / "own" / "class0"), 16)


def test_the_ranges_of_the_page_are_in_figures_csv():
    folder = ROOT / "tests" / "benchmarks"
    with (folder / "figures.csv").open(encoding="utf-8", newline="") as file:
        known = {row["range"] for row in csv.DictReader(file, strict=True)}
    shown = re.findall(r"\((\d[\d.]*-\d[\d.]*)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert len(shown) > 8 and not set(shown) - known
