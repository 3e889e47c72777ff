"""A run writes its files, and its figures are right."""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios

import pytest
import torch
from sklearn.metrics import accuracy_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bootfile.sampling.sampler import SequentialBatchSampler
from common.compute.models import resnet18
from datasets.loaders.engines.memory import make_loader
from datasets.memory import digits
from tests.conftest import LONGEST, QUICK, ROOT, environment, records, run, run_ranks


def test_accuracy_is_that_of_scikit_learn(tmp_path):
    """359 test samples are not divisible by 3 processes, and each sample counts once."""
    options = ("--batch_size=66", "--max_steps=4", "--lr=0.02", f"--output_dir={tmp_path}")
    run_ranks("jobs/train_ddp.py", *QUICK, *options, ranks=3)
    model = resnet18(channels=1, width=8)
    model.load_state_dict(torch.load(tmp_path / "epoch_1.pth", weights_only=True))
    model.eval()
    _, test_set = digits.load(None, custom_data=False)
    sampler = SequentialBatchSampler(359, 359)
    (images, labels), = make_loader(test_set, sampler, torch.device("cpu"))  # fmt: skip
    with torch.no_grad():
        logits = model(images)
    reported = records(tmp_path)[-1]
    assert reported["val_count"] == 359
    assert reported["val_acc"] == pytest.approx(accuracy_score(labels, logits.argmax(1)), abs=1e-12)
    assert reported["val_loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1).item(), rel=1e-4
    )


@pytest.mark.thorough
def test_the_end_names_the_best_epoch(tmp_path):
    """Also the end of a restart that only had to print it."""
    words = ("jobs/train.py", *QUICK, "--epochs=3", "--epoch_steps=2", "--save_every=1epoch")
    for _ in range(2):
        printed = run(*words, f"--output_dir={tmp_path}").stdout
        evaluations = [record for record in records(tmp_path) if "val_acc" in record]
        best = max(evaluations, key=lambda record: record["val_acc"])
        line = f"best: val_acc {best['val_acc']:.4g} at epoch {best['epoch']}"
        assert line in printed.splitlines()


@pytest.mark.thorough
def test_generated_images_are_learned_without_the_weights_of_epochs(tmp_path):
    """The accuracy on ten classes is far above chance after a few steps."""
    run(
        "jobs/train.py", *QUICK, "--custom_data=true", "--epochs=1", "--save_every=2epoch",
        "--epoch_weights=false", "--output_dir", tmp_path,
    )  # fmt: skip
    assert records(tmp_path)[-1]["val_acc"] > 0.4
    assert not list(tmp_path.glob("*.pth"))
    assert [path.name for path in (tmp_path / "checkpoints").glob("*.pt")] == ["step_39.pt"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", [("--custom_data=true", "--max_steps=20"), ("--dataset=digits", "--max_steps=40")]
)
def test_a_first_run_learns_with_the_rate_of_a_long_one(options, tmp_path):
    """Without the zero weights of models.resnet18() the loss of the validation rises to 40 and more."""
    run("jobs/train.py", *options, "--width=16", "--output_dir", tmp_path)
    evaluations = [line for line in records(tmp_path) if "val_loss" in line]
    assert max(line["val_loss"] for line in evaluations) < 2.5 and evaluations[-1]["val_acc"] > 0.25


def test_files_lines_and_table(tmp_path):
    result = run(
        "jobs/train.py", *QUICK, "--epochs=2", "--batch_size=256", "--report_every=3",
        "--output_dir", tmp_path / "new" / "folder",
    )  # fmt: skip
    output = tmp_path / "new" / "folder"
    names = sorted(path.name for path in output.iterdir())
    events = [name for name in names if name.startswith("events.out.tfevents")]
    assert len(events) == 1 and set(names) - {*events} == {
        "best.pth", "checkpoints", "classes.json", "ends.jsonl", "epoch_1.pth", "epoch_2.pth",
        "metrics.jsonl", "receipt.bin", "starts.jsonl", "state.jsonl",
    }  # fmt: skip
    for epoch in (1, 2):
        weights = torch.load(output / f"epoch_{epoch}.pth", weights_only=True)
        resnet18(channels=1, width=8).load_state_dict(weights)
        assert all(tensor.device.type == "cpu" for tensor in weights.values())

    lines = [line for line in result.stdout.splitlines() if line.startswith("epoch=")]
    assert [line.split(" time=")[0] for line in lines if " loss=" in line] == [
        "epoch=1 step=3/10", "epoch=1 step=5/10",
        "epoch=2 step=6/10", "epoch=2 step=9/10", "epoch=2 step=10/10",
    ]  # fmt: skip
    for name in ("time", "eta", "loss", "acc", "lr", "images_per_s", "data_time", "compute_time", "receipt"):
        assert all(f" {name}=" in line for line in lines if " loss=" in line)
    assert len(records(output)) == len(lines) == 7
    scalars = EventAccumulator(str(output)).Reload()
    assert [(event.step, event.value) for event in scalars.Scalars("loss")] == [
        (record["step"], pytest.approx(record["loss"], rel=1e-6))
        for record in records(output)
        if "loss" in record
    ]
    assert len(scalars.Scalars("val_acc")) == 2
    assert records(output)[3]["epoch"] == 2
    rows = ("imports and set-up", "data loading", "model and checkpoint", "training", "- computing", "total")
    for row in (*rows, "- waiting for data"):
        assert f"\n{row} " in result.stdout
    seconds = {
        row: float(result.stdout.split(f"\n{row} ")[1].split()[0]) for row in ("training", "- computing")
    }
    assert 0 < seconds["- computing"] < seconds["training"]
    assert f"test_accuracy={records(output)[-1]['val_acc']:.4f}" in result.stdout
    assert "\r" not in result.stdout + result.stderr, "a progress bar is for terminals"


def _read_to_the_end(terminal: int) -> str:
    """Return what a program writes to its terminal until it ends. Fail if it writes nothing for long."""
    shown = b""
    with contextlib.suppress(OSError):  # the program has closed its end
        while select.select([terminal], [], [], LONGEST)[0]:
            shown += os.read(terminal, 65536)
    os.close(terminal)
    return shown.decode()


@pytest.mark.thorough
@pytest.mark.parametrize("shows_lines", [False, True], ids=["stderr", "stdout and stderr"])
def test_a_terminal_gets_a_progress_bar(shows_lines, tmp_path):
    """A line on a terminal has no times, which the bar shows, and only the figures that fit."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    words = ["jobs/train.py", *QUICK, "--max_steps=2", "--report_every=1", f"--output_dir={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment(),
        stdout=end if shows_lines else subprocess.DEVNULL,
        stderr=end,
    )
    os.close(end)
    shown = _read_to_the_end(terminal)
    assert process.wait(LONGEST) == 0, shown
    assert "0/2" in shown and "2/2" in shown, "from before the first step to the last"
    assert "loss=" in shown
    lines = re.findall(r"epoch=1 step=\d/2 [^\r\n]*", shown)
    assert len(lines) == (3 if shows_lines else 0) and all(len(line) <= 100 for line in lines)
    assert not any(name in line for line in lines for name in ("receipt=", "memory_mb=", "time=2", "eta="))


def test_a_receipt_that_cannot_be_written_is_an_error(tmp_path):
    """What was deleted is written again (tests/bootfile/receipt/test_receipt.py). Here that fails."""
    (tmp_path / "receipt.bin").mkdir()
    done = run("jobs/train.py", *QUICK, "--max_steps=3", "--report_every=1", "--output_dir", tmp_path, code=6)
    assert done.stdout.count("warning: receipt.bin in ") == 1
    assert f"receipt.bin in {tmp_path} is not whole: [Errno 21] Is a directory" in done.stderr
