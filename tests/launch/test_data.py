"""`launch data` shows the samples of a step as the model got them, and the steps of a sample."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common.ground.exits import BadInput
from datasets.folders import image_folder
from datasets.loaders import backends
from datasets.loaders.engines.memory import make_loader
from datasets.loaders.loader import MEAN, STD
from datasets.loaders.replay import Step
from datasets.memory import image_set
from datasets.sampling import augment, effects
from datasets.sampling.sampler import BatchSampler, Plan
from datasets.stores.files import FileStore
from launch.data import cli, job, sheet
from launch.data.run import Run
from launch.new.cli import make_job
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
    sizes = [start["environment"]["world size"] for start in Run(str(output)).starts]
    assert sizes == [2, 1]
    assert [Run(str(output)).world_size(step) for step in range(1, 7)] == [2, 2, 1, 1, 1, 1]
    return output


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    output = tmp_path_factory.mktemp("digits") / "run"
    return continue_alone("jobs/train_ddp.py", *QUICK, f"--batch_size={DIGITS}", output=output)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Return (the folder of images, a run of imagenet.py on them)."""
    folder = tmp_path_factory.mktemp("photographs")
    data = pictures.make(folder / "data", train=20, val=6)
    words = (
        "jobs/imagenet.py", f"--data_url={data}", "--arch=shufflenet_v2_x0_5", f"--image_size={SIZE}",
        "--warmup=0", f"--batch_size={IMAGES}", "--data_backend=threads", "--trivial_augment",
        "--color_jitter=0.4", "--random_erasing=0.5", "--mixup=0.2", "--cutmix=1", "--training_only",
    )  # fmt: skip
    return data, continue_alone(*words, output=folder / "run")


DATA = """
    class Patients(torch.utils.data.Dataset):  # a small image with noise, and a number
        def __len__(self):
            return len(table)

        def __getitem__(self, id):
            return table[id, :9].view(1, 3, 3) + 0.1 * torch.rand(1, 3, 3), progression[id]

    patients = Patients()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Return (a project with a Dataset of its own, a run of it)."""
    folder = tmp_path_factory.mktemp("own") / "project"
    run("-m", "launch", "new", folder, "--ddp")
    text = make_job(ddp=True, amp=False)
    line = next(line for line in text.split("\n") if "patients = torch.utils.data.TensorDataset" in line)
    text = text.replace(line, DATA)
    text = text.replace("torch.nn.Linear(10, 64)", "torch.nn.Flatten(), torch.nn.Linear(9, 64)")
    (folder / "jobs" / "train.py").write_text(text)
    words = (folder / "jobs" / "train.py", "--batch_size=120", "--lr=0.01")
    return folder, continue_alone(*words, output=folder / "run")


def read(folder, steps, script=None, options=()) -> list:
    """Return steps of a run with their pixels, read by its job."""
    opened = Run(str(folder))
    return job.read_steps(opened, job.find_script(opened, script), steps, list(options), pixels=True)


def parts(step) -> list[slice]:
    """Return the rows of each rank."""
    ends = np.cumsum(np.bincount(step.ranks)).tolist()
    return [slice(first, last) for first, last in zip([0, *ends], ends, strict=False)]


def lines_of(text: str) -> list[list[str]]:
    """Return the words of the lines of a table, without its head."""
    return [line.split() for line in text.splitlines() if re.match(r"\d+ ", line)]


# The samples of a step


def test_the_samples_of_a_step_are_those_of_the_loader(digits):
    train_set, _ = image_set.load("digits", None, False)
    for step, size in zip(read(digits, [2, 5]), (2, 1), strict=True):
        assert (step.world_size, step.epoch, len(step.ids)) == (size, (step.step + 1) // 2, DIGITS)
        assert torch.equal(step.labels, train_set.labels[step.ids])
        for rank, part in enumerate(parts(step)):
            sampler = BatchSampler(len(train_set), DIGITS, 0, rank=rank, world_size=size)
            loader = make_loader(train_set, sampler, CPU, augment=True)
            loader.seek(step.step - 1)
            batch, pixels = next(loader.engine.run(loader.plan))
            assert step.ids[part].tolist() == batch.ids.tolist()
            assert torch.equal(torch.stack(step.pixels[part]), pixels)
            for name in ("top", "left", "flip"):
                assert step.parameters[name][part].tolist() == getattr(batch.crops, name).tolist()


def test_the_pixels_of_imagenet_are_those_that_its_model_gets(photographs, tmp_path):
    """With crops, TrivialAugment, colours, erased boxes, mixup and cutmix, in two processes and in one."""
    data, folder = photographs
    index = image_folder.load(str(data), "train", str(tmp_path))
    for step, size in zip(read(folder, [2, 5]), (2, 1), strict=True):
        for rank, part in enumerate(parts(step)):
            sampler = BatchSampler(len(index), IMAGES, 0, rank=rank, world_size=size)
            plan = Plan(index, sampler, augment.random_resized_crop, SIZE)
            with backends.build("threads", FileStore(index), plan, CPU, workers=1) as loader:
                loader.effects = EFFECTS
                loader.seek(step.step - 1)
                images, _ = next(iter(loader))
            mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (MEAN, STD))
            pixels = ((images * std + mean) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
            assert torch.equal(torch.stack(step.pixels[part]), pixels)
        assert step.names == [str(Path(index.path(id)).relative_to(index.base)) for id in step.ids.tolist()]
        assert step.classes == [name.split("/")[0] for name in step.names]


def test_the_items_of_a_dataset_of_your_own(project, tmp_path, capsys):
    """They are read with the random numbers of the run. The floats of its images are stretched."""
    folder, output = project
    picture = tmp_path / "own.png"
    words = ("--job", folder / "jobs" / "train.py", "--to", picture)
    assert cli.main([str(word) for word in (output, "--step=2", *words)]) == 0
    shown = lines_of(capsys.readouterr().out)
    sampler = BatchSampler(353, 120, 0)
    assert [int(words[1]) for words in shown] == sampler.batch(1).tolist()
    assert [int(words[0]) for words in shown] == [0] * 60 + [1] * 60
    assert all(words[2].startswith("(tensor([[[") for words in shown)
    two, alone = read(output, [2, 3], folder / "jobs" / "train.py")
    assert (two.world_size, alone.world_size, len(set(two.items))) == (2, 1, 120)
    assert len(two.pixels) == 120 and two.pixels[0].shape == (3, 3, 1)
    assert Image.open(picture).info["Software"] == sheet.MARK.pattern


def test_the_job_of_a_projects_own_folder_is_found(project):
    folder, output = project
    shown = run("-m", "launch", "data", output, "--step=3", cwd=folder)
    assert len(lines_of(shown.stdout)) == 120


def test_a_sheet_shows_each_pixel(digits, tmp_path):
    """Each pixel of a small image is a square."""
    before = {path: path.stat().st_mtime_ns for path in digits.rglob("*")}
    picture = tmp_path / "step.png"
    assert cli.main([str(digits), "--step=5", f"--to={picture}"]) == 0
    (step,) = read(digits, [5])
    drawn = np.asarray(Image.open(picture))
    scale = sheet.scale_of(8, 8)
    top = left = sheet.MARGIN
    first = drawn[top + sheet.LINE + sheet.MARGIN :, left:][: 8 * scale, : 8 * scale]
    expected = step.pixels[0].numpy().repeat(scale, 0).repeat(scale, 1)
    assert np.array_equal(first, np.broadcast_to(expected, first.shape))
    assert {path: path.stat().st_mtime_ns for path in digits.rglob("*")} == before, "the run was changed"


def test_a_step_is_read_as_its_rank_got_it():
    """Also what a `transform` draws, which depends on the first sample of the rank's part."""
    train_set, _ = image_set.load("digits", None, False)

    def loader_of(sampler):
        loader = make_loader(train_set, sampler, CPU, augment=True)
        loader.transform = lambda images, labels: (images // 2 + torch.randint_like(images, 100), labels)
        return loader

    sampler = BatchSampler(len(train_set), 32, 3, max_steps=60)
    whole = loader_of(sampler)
    whole.seek(7)
    for rank in range(2):
        part = loader_of(sampler.shard(rank, 2))
        part.seek(50)
        batch, images, labels = whole.read_step(50, rank, 2)
        expected = next(iter(part))
        assert torch.equal(images, expected[0]) and torch.equal(labels, expected[1])
        assert batch.ids.tolist() == sampler.shard(rank, 2).batch(50).tolist()
    assert (whole.plan.sampler.step, whole.plan.sampler.total_steps) == (7, 60), "it is not moved"
    assert len(whole.receipt.take()) == 0


# The steps of a sample


def test_the_steps_of_a_sample(digits, capsys):
    sampler = BatchSampler(1438, DIGITS, 0)
    batches = {step: sampler.batch(step - 1).tolist() for step in range(1, 7)}
    for id in (0, 7, 1437):
        assert cli.main([str(digits), f"--sample={id}"]) == 0
        shown = [words for words in lines_of(capsys.readouterr().out) if words[1] != "-"]
        places = {step: batch.index(id) for step, batch in batches.items() if id in batch}
        size = dict.fromkeys((1, 2), 2)
        expected = [
            [(step + 1) // 2, step, place * size.get(step, 1) // DIGITS] for step, place in places.items()
        ]
        assert [list(map(int, words)) for words in shown] == expected


def test_the_steps_of_a_file(photographs, capsys, monkeypatch):
    data, folder = photographs
    (step,) = read(folder, [1])
    name = step.names[3]
    monkeypatch.chdir(data / "train")
    for given in (name, str(data / "train" / name)):
        assert cli.main([str(folder), f"--sample={given}"]) == 0
        text = capsys.readouterr().out
        assert f"sample {int(step.ids[3])} ({data / 'train' / name})" in text
        assert ["1", "1", "0"] in lines_of(text)


# The steps before a jump of the loss


def write_losses(folder, losses: dict[int, float]) -> None:
    lines = (json.dumps({"epoch": 1, "step": step, "loss": loss}) for step, loss in losses.items())
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    "losses, words, steps, said",
    [
        ({1: 3.0, 2: 1.0, 3: 0.5, 4: 2.0, 5: 2.6, 6: 1}, [], [1, 2, 3, 4], "loss 2 at step 4"),
        ({1: 3.0, 2: 1.0, 3: 0.5, 4: 2.0, 5: 2.6, 6: 1}, ["5"], [2, 3, 4, 5], "loss 2.6 at step 5"),
        ({1: 3.0, 3: float("nan"), 4: 1.0, 6: 9.0}, [], [1, 2, 3], "loss nan at step 3"),
        ({1: 3.0, 3: 2.0, 6: 9.0}, ["4", "--count=2"], [5, 6], "the mean of the steps 4-6"),
    ],
)
def test_the_steps_up_to_a_jump_of_the_loss(losses, words, steps, said, digits, tmp_path):
    shutil.copytree(digits, tmp_path / "run")
    write_losses(tmp_path / "run", losses)
    count = int(words[1].partition("=")[2]) if len(words) > 1 else 4
    line, shown = Run(str(tmp_path / "run")).find_jump(int(words[0]) if words else 0, count)
    assert shown == steps and said in line


def test_around_prints_the_steps(digits):
    text = run("-m", "launch", "data", digits, "--around", "--count=1").stdout
    assert re.search(r"^loss \S+ at step \d, before it .*: the largest jump of the run", text)
    assert len(lines_of(text)) == DIGITS and text.count("equal to the receipt") == 1


# Bad input


def edit(folder, name, change) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


def other_seed(content: bytes) -> bytes:
    return content.replace(b'"seed": 0', b'"seed": 1')


CHANGES = {  # what happens to the folder of a run: (change, words, message)
    "no folder": (shutil.rmtree, ["--step=1"], "no run at RUN: not a folder"),
    "no receipt": (lambda run: (run / "receipt.bin").unlink(), ["--step=1"], "no receipt of a run at"),
    "short receipt": (lambda run: edit(run, "receipt.bin", lambda it: it[:64]), ["--step=3"],
                      "RUN has no step 3: its receipt has the steps 1-2"),
    "no starts": (lambda run: (run / "starts.jsonl").unlink(), ["--step=1"], "has no start that can be read"),
    "second start cut": (lambda run: edit(run, "starts.jsonl", lambda it: it[:-20]), ["--sample=1"],
                         "starts.jsonl: 1 of 2 lines are cut or damaged"),
    "metrics cut": (lambda run: edit(run, "metrics.jsonl", lambda it: it[:90]), ["--around"],
                    r"has 0 reports with a loss.*metrics.jsonl: 1 lines could not be read"),
    "other seed": (lambda run: edit(run, "starts.jsonl", other_seed), ["--sample=1"],
                   r"another digest for step \d: ids \w{16}, and now \w{16}"),
    "old run": (lambda run: edit(run, "starts.jsonl", lambda it: it.replace(b'"sampling"', b'"old"')),
                ["--sample=1"], "does not describe the order of the samples: sampling is {}"),
    "labels": (lambda run: edit(run, "receipt.bin", lambda it: it[:16] + b"\0" * 8 + it[24:]), ["--step=1"],
               "another digest for step 1: labels 0{16}, and now"),
    "other options of the job": (bool, ["--step=1", "--", "--custom_data=true"],
                                 r"had the fingerprint \w{32}, and now it is \w{32}"),
    "unknown option of the job": (bool, ["--step=1", "--", "--batchsize=4"], "unknown option"),
    "other job": (lambda run: edit(run, "starts.jsonl", lambda it: it.replace(b"train_ddp.py", b"mine.py")),
                  ["--step=1"], "name the script of the run, mine.py, with --job SCRIPT"),
    "step": (bool, ["--step=7"], "RUN has no step 7: its receipt has the steps 1-6"),
    "step of around": (bool, ["--around=7"], "has no report of step 7: the last one is of step 6"),
    "sample": (bool, ["--sample=1438"], r"sample 1438 is not in 0\.\.1437"),
    "file": (bool, ["--sample=a/b.jpg"], r"a/b.jpg is not an id in 0\.\.1437, and no index"),
    "two questions": (bool, ["--sample=1", "--step=1"], "expected one of --step N"),
    "script": (bool, ["--step=1", "--job=none.py"], "none.py: no such file"),
    "folder of the picture": (bool, ["--step=1", "--to=none/step.png"], "none is not a folder in which"),
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
    with pytest.raises(BadInput, match="was not made by this command"):
        cli.main([str(digits), "--step=1", f"--to={tmp_path / 'mine.png'}"])
    assert (tmp_path / "mine.png").read_text() == "mine"


@pytest.mark.parametrize("name", ["class_9/none.jpg", "lass_1/001.jpg", "class_1/001.jp", "1/001.jpgclass"])
def test_a_sample_that_is_not_in_the_index(name, photographs):
    with pytest.raises(BadInput, match=rf"--sample {name}: no such file among the 20 training images of"):
        cli.main([str(photographs[1]), f"--sample={name}"])


def test_images_that_changed_are_noticed_and_the_index_is_kept(photographs, tmp_path):
    data, folder = photographs
    folder = shutil.copytree(folder, tmp_path / "run")
    (step,) = read(folder, [1])
    path, kept = data / "train" / step.names[0], tmp_path / "kept.jpg"
    shutil.copy2(path, kept)
    try:
        Image.new("RGB", (40, 40)).save(path)
        before = {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()}
        with pytest.raises(BadInput, match="and now it is"):
            cli.main([str(folder), "--step=1", f"--to={tmp_path / 'step.png'}"])
        assert not (tmp_path / "step.png").exists()
        assert {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()} == before
    finally:
        shutil.copy2(kept, path)


def test_a_script_that_uses_no_loader(digits, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("print('done')\n")
    with pytest.raises(BadInput, match=r"mine.py could not read the data: it read no step with a loader"):
        read(digits, [1], script)


def test_a_large_batch_is_drawn_in_part():
    pixels = [torch.full((2000, 2000, 3), 7, dtype=torch.uint8)] * 40
    picture, count = sheet.draw([_step(1, pixels)])
    assert 0 < count < 40 and picture.width * picture.height < 3 * 10**8
    with pytest.raises(BadInput, match="step 3 has no images"):
        sheet.draw([_step(3, [])])


def _step(number, pixels):
    ids = torch.arange(len(pixels))
    return Step(number, 1, 1, torch.zeros(3), ids * 0, ids, ids, {}, [], [], [], pixels)
