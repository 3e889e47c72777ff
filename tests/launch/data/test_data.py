"""`launch data` shows the samples of a step as the run got them, and the steps of a sample."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bootfile.ground.errors import BadInput
from bootfile.receipt.recorded_run import Run
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler
from datasets.folders import image_folder
from datasets.loaders import backends
from datasets.loaders.engines.memory import make_loader
from datasets.memory import image_set
from datasets.sampling import augment, effects
from datasets.stores.files import FileStore
from launch.data import cli, samples
from tests.conftest import QUICK, run, run_ranks
from tests.support import pictures

CPU = torch.device("cpu")
BOTH = ("--save_every=2", "--report_every=1", "--max_steps=6", "--keep=9")
DIGITS = 600  # samples of a step: an epoch has two steps
IMAGES, SIZE = 8, 32
EFFECTS = effects.Effects(True, 0.4, 0.5, 0.2, 1.0)


def continue_alone(*command, output) -> Path:
    """Run a job on two ranks to step 6, and continue it from its checkpoint of step 2 in one process."""
    words = (*command, *BOTH, f"--output_dir={output}")
    run_ranks(*words)
    for path in (output / "checkpoints").glob("step_[!2]*"):
        path.unlink()
    run(*words)
    opened = Run(str(output))
    assert [int(opened.ranks(opened.sampler(step), step)[-1]) + 1 for step in range(1, 7)] == [
        2,
        2,
        1,
        1,
        1,
        1,
    ]
    return output


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    output = tmp_path_factory.mktemp("digits") / "run"
    return continue_alone("jobs/train_ddp.py", *QUICK, f"--batch_size={DIGITS}", output=output)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Return (the folder of images, a run of imagenet.py on them), whose images become larger later."""
    folder = tmp_path_factory.mktemp("photographs")
    data = pictures.make(folder / "data", train=20, val=6)
    words = (
        "jobs/imagenet.py", f"--data_url={data}", "--arch=shufflenet_v2_x0_5", f"--first_image_size={SIZE}",
        "--image_size=64", "--warmup=0", f"--batch_size={IMAGES}", "--data_backend=threads",
        "--trivial_augment", "--color_jitter=0.4", "--random_erasing=0.5", "--mixup=0.2", "--cutmix=1",
        "--training_only",
    )  # fmt: skip
    return data, continue_alone(*words, output=folder / "run")


def read(folder, *steps, data_url=None) -> list[samples.Step]:
    """Return steps of a run with their pixels."""
    opened = Run(str(folder))
    with samples.open_data(opened, data_url) as data:
        return [samples.read_step(opened, step, data, True) for step in steps]


def lines_of(text: str) -> list[list[str]]:
    """Return the words of the lines of a table, without its head."""
    return [line.split() for line in text.splitlines() if re.match(r"\d+ ", line)]


# The samples of a step


def test_the_samples_of_a_step_are_those_of_the_loader(digits):
    train_set, _ = image_set.load("digits", None, False)
    for step, size in zip(read(digits, 2, 5), (2, 1), strict=True):
        columns = {name: np.array(values) for name, values in step.columns.items()}
        assert columns["rank"].tolist() == sorted([*range(size)] * (DIGITS // size))
        for rank in range(size):
            sampler = BatchSampler(len(train_set), DIGITS, 0, rank=rank, world_size=size)
            loader = make_loader(train_set, sampler, CPU, augment=True)
            loader.seek(step.step - 1)
            batch, pixels = next(loader.engine.run(loader.plan))
            rows = columns["rank"] == rank
            assert columns["id"][rows].tolist() == batch.ids.tolist()
            assert columns["label"][rows].tolist() == [str(label) for label in batch.labels]
            assert np.array_equal(step.pixels[rows], pixels)
            for name in ("top", "left", "flip"):
                assert columns[name][rows].tolist() == getattr(batch.crops, name).tolist()


@pytest.mark.thorough
def test_the_pixels_of_imagenet_are_those_that_its_model_gets(photographs, tmp_path):
    """With crops, TrivialAugment, colours, erased boxes, mixup and cutmix, in two processes and in one."""
    data, folder = photographs
    index = image_folder.load(str(data), "train", str(tmp_path))
    for step, size in zip(read(folder, 2, 5), (2, 1), strict=True):
        for rank in range(size):
            sampler = BatchSampler(len(index), IMAGES, 0, rank=rank, world_size=size)
            plan = Plan(index, sampler, augment.random_resized_crop, SIZE)
            with backends.build("threads", FileStore(index), plan, CPU, workers=1) as loader:
                loader.effects = EFFECTS
                loader.seek(step.step - 1)
                images, _ = next(iter(loader))
            pixels = pictures.to_pixels(images).permute(0, 2, 3, 1)
            assert np.array_equal(step.pixels[np.array(step.columns["rank"]) == rank], pixels)
        assert step.columns["file"] == [index.name(id) for id in step.columns["id"]]
        assert step.columns["label"] == [name.split("/")[0] for name in step.columns["file"]]


def test_data_that_were_moved(photographs, tmp_path, capsys):
    """--count shows the steps before, too."""
    data, folder = photographs
    moved = shutil.copytree(data, tmp_path / "moved")
    assert cli.main([str(folder), "--step=3", "--count=3", f"--data_url={moved}"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^step (\d), epoch (\d), 8 samples: equal to the receipt$", text, re.MULTILINE) == [
        ("1", "1"), ("2", "1"), ("3", "2")
    ]  # fmt: skip
    assert [words[0] for words in lines_of(text)] == [*"000011110000111100000000"]


@pytest.mark.thorough
def test_a_short_recipe_is_shown(tmp_path):
    """It mirrors images at the border, and every second epoch shows the other mirror image."""
    words = ("--custom_data=true", "--width=8", "--batch_size=512", "--epoch_steps=1", "--max_steps=2")
    words += ("--report_every=1", "--short_recipe=true", f"--output_dir={tmp_path / 'run'}")
    run("jobs/train_fast.py", *words)
    first, second = read(tmp_path / "run", 1, 2)
    flips = [dict(zip(each.columns["id"], each.columns["flip"], strict=True)) for each in (first, second)]
    both = flips[0].keys() & flips[1].keys()
    assert len(both) > 20 and all(flips[0][id] != flips[1][id] for id in both)


def test_of_a_dataset_of_your_own_only_ids_are_known(tmp_path, capsys):
    run("jobs/train_own.py", "--max_steps=2", "--report_every=1", f"--output_dir={tmp_path / 'run'}")
    assert cli.main([str(tmp_path / "run"), "--step=2"]) == 0
    text = capsys.readouterr().out
    assert [int(id) for _, id in lines_of(text)] == BatchSampler(354, 128, 0).batch(1).tolist()
    assert re.search("ids equal .*; no labels", text) and "Dataset" in text
    with pytest.raises(BadInput, match=r"Dataset .*no images"):
        cli.main([str(tmp_path / "run"), "--step=2", f"--to={tmp_path / 'own.png'}"])


def test_a_sheet_shows_each_pixel(digits, tmp_path):
    """Each pixel of a small image is a square."""
    before = {path: path.stat().st_mtime_ns for path in digits.rglob("*")}
    picture = tmp_path / "step.png"
    assert cli.main([str(digits), "--step=5", f"--to={picture}"]) == 0
    (step,) = read(digits, 5)
    drawn = np.asarray(Image.open(picture))
    scale = samples.LEAST // 8
    first = drawn[samples.MARGIN :, samples.MARGIN :][: samples.LEAST, : samples.LEAST]
    expected = step.pixels[0].repeat(scale, 0).repeat(scale, 1)
    assert np.array_equal(first, np.broadcast_to(expected, first.shape))
    assert {path: path.stat().st_mtime_ns for path in digits.rglob("*")} == before, "the run was changed"


def test_a_large_batch_is_drawn_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "_MOST", 10**5)
    columns = {"label": ["\u7334"] * 40, "id": [*range(40)]}
    step = samples.Step(1, "", columns, np.full((40, 64, 64, 3), 7, np.uint8))
    line = samples.save_sheet([step], str(tmp_path / "s.png"))
    count, total = map(int, re.search(r"(\d+) images of (\d+)", line).groups())
    with Image.open(tmp_path / "s.png") as picture:
        assert 0 < count < total == 40 and picture.width * picture.height < 1.3 * 10**5


# The steps of a sample


def test_the_steps_of_a_sample(digits, capsys):
    sampler = BatchSampler(1438, DIGITS, 0)
    batches = {step: sampler.batch(step - 1).tolist() for step in range(1, 7)}
    for id in (0, 7, 1437):
        assert cli.main([str(digits), f"--sample={id}"]) == 0
        lines = lines_of(capsys.readouterr().out)
        # a rest that is smaller than a batch is one reason, --epoch_steps another
        assert all(
            words[3:] == ["the", "epoch", "ends", "before", "it"] for words in lines if words[1] == "-"
        )
        shown = [words for words in lines if words[1] != "-"]
        places = {step: batch.index(id) for step, batch in batches.items() if id in batch}
        size = dict.fromkeys((1, 2), 2)
        expected = [
            [(step + 1) // 2, step, place * size.get(step, 1) // DIGITS] for step, place in places.items()
        ]
        assert [list(map(int, words)) for words in shown] == expected


def test_the_steps_of_a_file(photographs, capsys, monkeypatch):
    data, folder = photographs
    (step,) = read(folder, 1)
    name, id = step.columns["file"][3], step.columns["id"][3]
    monkeypatch.chdir(data / "train")
    for given in (name, str(data / "train" / name)):
        assert cli.main([str(folder), f"--sample={given}"]) == 0
        text = capsys.readouterr().out
        assert f"sample {id} ({data / 'train' / name})" in text
        assert ["1", "1", "0"] in lines_of(text)


# Bad input


def edit(folder, name, change) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


def other_seed(content: bytes) -> bytes:
    return content.replace(b'"seed": 0', b'"seed": 1')


def generated(content: bytes) -> bytes:
    return content.replace(b'"custom_data": false', b'"custom_data": true')


def other_options(content: bytes) -> bytes:
    return content.replace(b'"dataset"', b'"data_backend"')


CHANGES = {  # what happens to the folder of a run: (change, words, message)
    "no folder": (shutil.rmtree, ["--step=1"], "no receipt .* RUN"),
    "no receipt": (lambda run: (run / "receipt.bin").unlink(), ["--step=1"], "no receipt .* RUN"),
    "short receipt": (lambda run: edit(run, "receipt.bin", lambda it: it[:64]), ["--step=3"],
                      r"RUN .*no step 3: .*\b1-2"),
    "no starts": (lambda run: (run / "starts.jsonl").unlink(), ["--step=1"], "no start .*read"),
    "second start cut": (lambda run: edit(run, "starts.jsonl", lambda it: it[:-20]), ["--sample=1"],
                         "starts.jsonl: 1 of 2 lines .*damaged"),
    "other seed": (lambda run: edit(run, "starts.jsonl", other_seed), ["--sample=1"],
                   r"another digest .*step \d: ids \w{16}, .*now \w{16}"),
    "old run": (lambda run: edit(run, "starts.jsonl", lambda it: it.replace(b'"sampling"', b'"old"')),
                ["--sample=1"], "not describe .*order .*: {}"),
    "labels": (lambda run: edit(run, "receipt.bin", lambda it: it[:16] + b"\0" * 8 + it[24:]), ["--step=1"],
               "another digest .*step 1: labels 0{16}, .*now"),
    "other data": (lambda run: edit(run, "starts.jsonl", generated), ["--step=1"],
                   r"had the fingerprint \w{32}, now \w{32}: they changed"),
    "no options": (lambda run: edit(run, "starts.jsonl", other_options), ["--step=1"],
                   "not describe the data"),
    "step": (bool, ["--step=7"], r"RUN .*no step 7: .*\b1-6"),
    "sample": (bool, ["--sample=1438"], r"sample 1438 is not in 0\.\.1437"),
    "file": (bool, ["--sample=a/b.jpg"], r"a/b.jpg .*neither .*0\.\.1437 nor .*image"),
    "two questions": (bool, ["--sample=1", "--step=1"], "expected one of --step N"),
    "folder of the picture": (bool, ["--step=1", "--to=none/step.png"], "none .*not a folder"),
    "name": (bool, ["--step=1", "--to=step.jpg"], r"ends in .png"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_bad_input_is_one_line(name, digits, tmp_path, capsys):
    change, words, message = CHANGES[name]
    folder = shutil.copytree(digits, tmp_path / "run")
    change(folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadInput, match=message.replace("RUN", str(folder))) as error:
        cli.main([str(folder), *words])
    assert "\n" not in str(error.value) and not capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_that_is_not_a_sheet_is_kept(digits, tmp_path):
    (tmp_path / "mine.png").write_text("mine")
    with pytest.raises(BadInput, match=r"mine\.png .*not made by"):
        cli.main([str(digits), "--step=1", f"--to={tmp_path / 'mine.png'}"])
    assert (tmp_path / "mine.png").read_text() == "mine"


@pytest.mark.parametrize("name", ["class_9/none.jpg", "lass_1/001.jpg", "class_1/001.jp", "1/001.jpgclass"])
def test_a_sample_that_is_not_in_the_index(name, photographs):
    with pytest.raises(BadInput, match=rf"--sample {name} .*neither .*0\.\.19 nor .*image"):
        cli.main([str(photographs[1]), f"--sample={name}"])


def test_images_that_changed_are_noticed_and_the_index_is_kept(photographs, tmp_path):
    data, folder = photographs
    folder = shutil.copytree(folder, tmp_path / "run")
    (step,) = read(folder, 1)
    path, kept = data / "train" / step.columns["file"][0], tmp_path / "kept.jpg"
    shutil.copy2(path, kept)
    try:
        Image.new("RGB", (40, 40)).save(path)
        before = {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()}
        with pytest.raises(BadInput, match="had the fingerprint"):
            cli.main([str(folder), "--step=1", f"--to={tmp_path / 'step.png'}"])
        assert not (tmp_path / "step.png").exists()
        assert {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()} == before
    finally:
        shutil.copy2(kept, path)
