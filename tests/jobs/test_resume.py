"""A job that was stopped or killed resumes with the results of an uninterrupted run, bit for bit."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from bootfile.exact import checked_files
from bootfile.exact import files as checkpoint
from bootfile.receipt import receipt
from datasets.memory import digits
from tests.conftest import (
    QUICK,
    finish,
    interrupt,
    processes_of,
    read_until,
    records,
    run,
    run_ranks,
    start,
    start_until,
)
from tests.support.exact import changed
from tests.support.small_disk import small_disk

# 5 steps an epoch, 3 epochs
DATA = (*QUICK, "--batch_size=240", "--epochs=3", "--report_every=1", "--save_every=2")
DDP = ("jobs/train_ddp.py", *DATA)
TWO = (*DDP, "--processes_per_node=2")
ONE = ("jobs/train.py", *DATA)


def figures(output) -> list[dict]:
    """Return the records of metrics.jsonl without times."""
    clocks = ("time", "data_time", "compute_time", "memory_mb", "ranks")
    return [
        {name: line[name] for name in line if name not in clocks and not name.endswith("_per_s")}
        for line in records(output)
    ]


def weights(output, name="epoch_3.pth") -> dict[str, torch.Tensor]:
    return torch.load(Path(output) / name, weights_only=True)


def same_weights(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folders of train.py and of train_ddp.py with two processes, both never interrupted."""
    outputs = [tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")]
    run(*ONE, f"--output_dir={outputs[0]}")
    run_ranks(*DDP, f"--output_dir={outputs[1]}")
    return outputs


@pytest.mark.thorough  # half a minute
def test_three_processes_add_in_the_same_order_after_a_restart(tmp_path):
    """With three processes or more, the rounding depends on the order in which gradients are added."""
    three = (*DDP, "--max_steps=4")
    run_ranks(*three, f"--output_dir={tmp_path / 'whole'}", ranks=3)
    middle = tmp_path / "whole" / "checkpoints" / "step_2.pt"
    run_ranks(*three, f"--output_dir={tmp_path / 'resumed'}", f"--resume={middle}", ranks=3)
    last = (weights(tmp_path / folder, "epoch_1.pth") for folder in ("whole", "resumed"))
    assert same_weights(*last)


@pytest.mark.thorough
def test_a_lost_process_does_not_cost_the_save_in_flight(tmp_path):
    job = start(*TWO, f"--output_dir={tmp_path}")
    folder = tmp_path / "checkpoints"
    read_until(job, "^epoch=1 step=1/")
    while not (folder.exists() and list(folder.glob(".partial-*"))):
        assert job.poll() is None
        time.sleep(0.001)
    os.kill(processes_of(job)[1], signal.SIGKILL)
    finish(job, 128 + signal.SIGKILL)
    assert not list(folder.glob(".partial-*"))
    checked_files.read(checkpoint.list_newest_first(str(folder))[0])


def test_sigterm_costs_no_step(whole, tmp_path):
    """If one rank receives the signal, all ranks stop at the same step."""
    stopped, _, continue_it = start_until(*TWO, f"--output_dir={tmp_path}", at=r"^epoch=2 step=6/")
    for _ in range(2):  # a second one changes nothing
        os.kill(processes_of(stopped)[-1], signal.SIGTERM)
    continue_it()
    output = finish(stopped, 143).stdout
    said = r"stopped .*step (\d+); .*checkpoint .*step \1\n"
    last = int(re.search(said, output)[1])
    assert re.search(r"SIGTERM: stopping .*\b25 s\b", output) and 6 <= last < 15
    command = re.search(r"^to continue: python (.*)$", output, re.MULTILINE)[1].split()
    assert command[0].endswith("train_ddp.py") and command.count(f"--output_dir={tmp_path}") == 1
    assert "--output_dir" not in command, "it is not given twice"

    resumed = run_ranks(*DDP, f"--output_dir={tmp_path}")[0].stdout
    assert f"step_{last}.pt: epoch {-(-last // 5)}, step {last} of 15\n" in resumed
    assert figures(tmp_path) == figures(whole[1])
    assert same_weights(weights(tmp_path), weights(whole[1]))
    assert (tmp_path / receipt.FILE).read_bytes() == (whole[0] / receipt.FILE).read_bytes()


def test_an_evaluation_within_an_epoch_changes_no_training_step(whole, tmp_path):
    """An epoch has 5 steps, and --evaluate_every 3. The run is killed after step 7. It continues from
    step 6, and repeats its evaluation."""
    options = (f"--output_dir={tmp_path}", "--evaluate_every=3")
    interrupt(*ONE, *options, at="^epoch=2 step=7/")
    run(*ONE, *options)
    evaluations = [line for line in figures(tmp_path) if "val_acc" in line]
    assert [line["step"] for line in evaluations] == [3, 5, 6, 9, 10, 12, 15]
    assert [line["epoch"] for line in evaluations] == [1, 1, 2, 2, 2, 3, 3]
    ours, theirs = figures(tmp_path), figures(whole[0])
    assert [line for line in ours if line["step"] % 5 == 0 or "loss" in line] == theirs
    assert same_weights(weights(tmp_path), weights(whole[0]))
    assert (tmp_path / receipt.FILE).read_bytes() == (whole[0] / receipt.FILE).read_bytes()
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == [
        "best.pth", "epoch_1.pth", "epoch_2.pth", "epoch_3.pth",
    ]  # fmt: skip
    best = max(evaluations, key=lambda line: line["val_acc"])
    printed = run("jobs/train.py", *DATA, "--evaluate", f"--weights={tmp_path}/best.pth").stdout
    assert f"val_acc={best['val_acc']:.6g} " in printed


@pytest.mark.thorough
def test_a_checkpoint_of_any_job_resumes_in_any_job(whole, tmp_path):
    """train_dp.py, then two processes, then mixed precision. A run that has ended trains no step again."""
    output = f"--output_dir={tmp_path}"
    run("jobs/train_dp.py", *DATA, output, "--max_steps=4")
    assert "step 4 of 7\n" in run_ranks(*DDP, output, "--max_steps=7")[0].stdout
    assert "step 7 of 15\n" in run("jobs/train_amp.py", *DATA, output).stdout
    assert (tmp_path / receipt.FILE).read_bytes() == (whole[0] / receipt.FILE).read_bytes()
    before = figures(tmp_path)
    again = run(*ONE, output).stdout
    assert "step 15 of 15\n" in again and "skipped" not in again
    assert [line for line in figures(tmp_path) if "loss" in line] == [
        line for line in before if "loss" in line
    ]


@pytest.mark.thorough
def test_a_batch_may_be_counted_by_process(tmp_path):
    """--batch_size 16/gpu with 2 processes is --batch_size 32, and one process can resume it."""
    common = (*QUICK, "--lr=0.01", f"--output_dir={tmp_path}", "--save_every=2")
    first, _ = run_ranks("jobs/train_ddp.py", *common, "--batch_size=16/gpu", "--max_steps=2")
    assert re.search(r"global batch 32 = 2 processes x 16, \d threads? each;", first.stdout)
    second = run("jobs/train.py", *common, "--batch_size=32", "--max_steps=4").stdout
    assert "step_2.pt: epoch 1, step 2 of 4" in second and "global batch 32 = 1 process x 32, " in second


def test_the_files_of_a_run(whole):
    """They are the newest three checkpoints, and the weights of every epoch and the best epoch."""
    names = sorted(os.listdir(whole[1] / "checkpoints"))
    steps = [f"step_{step}.pt" for step in (12, 14, 15)]
    assert names == sorted([*steps, *(f"{step}.json" for step in steps)])
    best = max((line for line in figures(whole[1]) if "val_acc" in line), key=lambda line: line["val_acc"])
    assert same_weights(weights(whole[1], "best.pth"), weights(whole[1], f"epoch_{best['epoch']}.pth"))
    state = checked_files.read(str(whole[1] / "checkpoints" / "step_15.pt"))
    assert same_weights(state["objects"]["model"], weights(whole[1]))
    identity = {"--dataset": "digits", "--custom_data": False, "--width": 8, "--batch_size": 240, "--seed": 0}
    identity |= {"--epoch_steps": None}
    data = digits.load(None, False)[0].fingerprint
    assert state["identity"] == identity | {"training data": data}
    assert state["step"] == 15
    assert state["objects"]["receipt"]["digest"] == figures(whole[1])[-2]["receipt"]


@pytest.fixture
def started(whole, tmp_path):
    """Return a folder with the checkpoints of train.py, as a platform restores them."""
    (tmp_path / "checkpoints").mkdir()
    for path in (whole[0] / "checkpoints").iterdir():
        os.link(path, tmp_path / "checkpoints" / path.name)
    return tmp_path


def test_another_label_is_another_run(started, tmp_path):
    place = "    train_sampler = "
    other = f"    train_set.labels[7] = 9 - train_set.labels[7]\n{place}"
    job = changed("train.py", tmp_path / "changed.py", (place, other))
    error = run(job, *DATA, f"--output_dir={started}", code=2).stderr
    assert f"training data is {digits.load(None, False)[0].fingerprint}" in error


def test_damaged_files_are_named_and_the_one_before_is_taken(started, whole):
    folder = started / "checkpoints"
    for name in ("step_15.pt", "step_14.pt"):
        (folder / name).unlink()
        (folder / name).write_bytes(b"<html>")
    output = run(*ONE, f"--output_dir={started}").stdout
    for name in ("step_15.pt", "step_14.pt"):
        assert re.search(f"checkpoint refused: {folder}/{name}: .* 6 bytes", output)
    assert f"resumed from {folder}/step_12.pt: epoch 3, step 12 of 15\n" in output
    assert same_weights(weights(started), weights(whole[0]))


def test_only_damaged_files_are_an_error_not_a_new_start(started):
    folder = started / "checkpoints"
    for path in folder.glob("*.pt"):
        path.unlink()
        path.write_bytes(b"torn")
    error = run(*ONE, f"--output_dir={started}", code=2).stderr
    assert error.count("it has 4 bytes, expected ") == 3 and "use another output folder" in error


def test_a_run_that_diverges_ends(tmp_path):
    result = run(*ONE, f"--output_dir={tmp_path}", "--lr=1e9", "--max_bad_steps=3", code=7)
    assert result.stdout.count("skipped a step: loss ") == 3
    assert re.search(r"error: 3 steps .*finite .*\(max_bad_steps\)", result.stderr)


def test_one_bad_step_is_skipped_on_every_process(tmp_path):
    """If only rank 1 has a batch with NaN, no process takes the step, and BatchNorm's statistics stay."""
    poison = (
        "import runpy, sys, torch; sys.path.insert(0, '.')\n"
        "from datasets.loaders import image_loader as loader\n"
        "original, count = loader.ToDevice.end, 0\n"
        "def poisoned(self, copy):\n"
        "    global count\n"
        "    images, labels = original(self, copy)\n"
        "    count += 1\n"
        "    if count == 3 and torch.distributed.get_rank() == 1: images[0] = float('nan')\n"
        "    return images, labels\n"
        "loader.ToDevice.end = poisoned\n"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    output = run_ranks("-c", poison, *DDP, f"--output_dir={tmp_path}", "--max_steps=5")[0].stdout
    assert output.count("skipped a step: ") == 1 and "1 in a row, 1 in all" in output
    lines = [line for line in figures(tmp_path) if "loss" in line]
    assert lines[2]["loss"] != lines[2]["loss"]  # no step was taken: nothing to report
    assert all(line["loss"] == line["loss"] for line in lines if line["step"] != 3)
    for name, tensor in weights(tmp_path, "epoch_1.pth").items():
        assert torch.isfinite(tensor).all(), name


def test_an_output_that_fills_up_is_named_and_training_goes_on(tmp_path):
    with small_disk(tmp_path, "4m"):  # room for the weights
        result = run(*ONE, "--width=16", f"--output_dir={tmp_path}", "--max_steps=5", code=6)
    assert re.search(
        r"warning: step_2.pt was not saved: No space left on device, 5.\d MB .*\(\d+.\d MB free",
        result.stdout,
    )
    assert "epoch=1 step=5/" in result.stdout and "error: step_5.pt was not saved: " in result.stderr


def test_a_checkpoint_of_a_version_with_more_options_continues(tmp_path, whole):
    path = checkpoint.list_newest_first(str(whole[0] / "checkpoints"))[-1]
    state = checked_files.read(path)
    old = tmp_path / "old" / f"step_{state['step']}.pt"
    old.parent.mkdir()
    checkpoint.write(str(old), {**state, "arguments": state["arguments"] | {"upload_timeout": 60.0}})
    out = tmp_path / "out"
    run(*ONE, f"--output_dir={out}", f"--resume={old}")
    assert same_weights(weights(out), weights(whole[0]))
