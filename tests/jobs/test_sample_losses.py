"""--sample_losses keeps the loss of each sample, and `launch data RUN --around STEP` names the largest."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from common.run.sample_losses import path_of, read
from launch.data import cli
from tests.conftest import QUICK, environment, interrupt, losses, records, refused, run, run_ranks
from tests.support.marks import ROOT

KEPT = (
    *QUICK, "--batch_size=100", "--max_steps=6", "--report_every=1", "--save_every=2", "--sample_losses=true",
)  # fmt: skip
PLANTED = 17  # an id


def read_all(folder, rank: int) -> dict:
    return read(str(folder), rank, range(1, 1000))


def planted_job(folder, line: str):
    """Write train.py with a line after the forward pass; `own` is where the batch has the planted sample."""
    text = (ROOT / "jobs/train.py").read_text(encoding="utf-8")
    place = "            logits = forward(inputs)\n"
    own = f"            own = torch.from_numpy(train_loader.batch.ids == {PLANTED})\n"
    assert text.count(place) == 1
    path = folder / "job.py"
    path.write_text(text.replace(place, f"{place}{own}            {line}\n"), encoding="utf-8")
    return path


def run_planted(folder, line, *options) -> list[tuple[int, np.ndarray]]:
    """Run it, and return (step, losses of the planted sample)."""
    path, output = planted_job(folder, line), folder / "run"
    words = (*QUICK, "--batch_size=100", "--report_every=1", "--sample_losses=true", *options)
    run(str(path), *words, f"--output_dir={output}", env=environment(PYTHONPATH=str(ROOT)))
    return [(step, found[ids == PLANTED]) for step, (ids, found) in read_all(output, 0).items()]


def first_row(capsys, folder, step: int) -> dict[str, str]:
    assert cli.main([str(folder), f"--around={step}"]) == 0
    head, first, *_ = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    return dict(zip(head.split(), first.split(), strict=True))


def test_the_mean_is_the_loss_of_the_report_and_training_does_not_change(tmp_path):
    run("jobs/train.py", *KEPT, f"--output_dir={tmp_path / 'kept'}")
    run("jobs/train.py", *KEPT[:-1], f"--output_dir={tmp_path / 'plain'}")
    kept, plain = losses(tmp_path / "kept"), losses(tmp_path / "plain")
    assert kept == plain
    means = [each.mean() for _, each in read_all(tmp_path / "kept", 0).values()]
    assert np.allclose(means, kept, rtol=1e-5) and len(means) == 6
    weights = [torch.load(tmp_path / name / "epoch_1.pth", weights_only=True) for name in ("kept", "plain")]
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())
    assert not (tmp_path / "plain/losses-0.bin").exists()


def test_two_processes_write_their_own_parts(tmp_path, capsys):
    run_ranks("jobs/train_ddp.py", *KEPT, f"--output_dir={tmp_path}")
    own = [read_all(tmp_path, rank) for rank in range(2)]
    steps = [line for line in records(tmp_path) if "loss" in line]
    for line in steps:
        found = np.concatenate([each[line["step"]][1] for each in own])
        assert len(found) == 100 and np.isclose(found.mean(), line["loss"], rtol=1e-5)
    row = first_row(capsys, tmp_path, 6)
    ids, found = own[int(row["rank"])][int(row["step"])]
    assert float(row["loss"]) == pytest.approx(found.max(), rel=1e-5)
    assert int(row["id"]) == ids[found.argmax()]


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_restart_gives_the_same_file(tmp_path, by):
    for name in ("whole", "killed"):
        words = ("jobs/train.py", *KEPT, f"--output_dir={tmp_path / name}")
        if name == "killed":
            interrupt(*words, at=r"step=3 ", by=by)
            assert read_all(tmp_path / name, 0).keys() >= {1, 2, 3}
        run(*words)
    whole, killed = (Path(path_of(str(tmp_path / name), 0)).read_bytes() for name in ("whole", "killed"))
    assert whole == killed and len(whole) == 6 * (16 + 100 * 12)


def test_a_loss_that_is_not_a_number_is_kept_and_named(tmp_path, capsys):
    steps = run_planted(tmp_path, "logits = logits.masked_fill(own[:, None], torch.nan)", "--epochs=1")
    spike, = (step for step, found in steps if len(found))  # fmt: skip
    row = first_row(capsys, tmp_path / "run", spike)
    assert (row["step"], row["loss"], row["id"], row["rank"]) == (str(spike), "nan", str(PLANTED), "0")


def test_a_wrong_label_is_named(tmp_path, capsys):
    steps = run_planted(tmp_path, "targets = torch.where(own, (targets + 5) % 10, targets)", "--epochs=5")
    spike = [step for step, found in steps if len(found)][-1]
    assert cli.main([str(tmp_path / "run"), f"--around={spike}"]) == 0
    head, *rows = (line.split() for line in capsys.readouterr().out.partition("\n\n")[2].splitlines())
    named = [(row[head.index("step")], row[head.index("id")]) for row in rows]
    assert len(named) == 10 and (str(spike), str(PLANTED)) in named


def test_a_criterion_of_means_is_refused(tmp_path):
    line = refused("jobs/train_text.py", "--sample_losses=true", f"--output_dir={tmp_path / 'run'}")
    assert re.search(r"--sample_losses.*reduction", line) and not (tmp_path / "run/metrics.jsonl").exists()


def test_a_run_without_losses_is_refused(tmp_path):
    run("jobs/train.py", *KEPT[:-1], f"--output_dir={tmp_path}")
    assert "--sample_losses true" in refused("-m", "launch", "data", str(tmp_path), "--around=3")
