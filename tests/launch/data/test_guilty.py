"""The samples of a step that made a spike are found by replays without parts of its batch."""

import contextlib
import io
import math
import re

import pytest

from bootfile.receipt.recorded_run import Run
from launch.data import cli
from tests.conftest import QUICK, refused, run
from tests.support.exact import changed
from tests.support.proofs import forked_jobs

BATCH = 256
STEP = 4
WORDS = (
    *QUICK,
    f"--batch_size={BATCH}",
    "--epoch_steps=5",
    "--epochs=2",
    "--save_every=3",
    "--report_every=1",
)
POISON = """            ids = train_loader.batch.ids.tolist()
            bad = [place for place, id in enumerate(ids) if id in POISON and step == 3]
            loss = criterion(logits, targets)
            if bad:
                loss = loss + 300 / len(POISON) * criterion(logits[bad], (targets[bad] + 1) % 10) * len(bad)
"""


def train(folder, ids):
    """Return a run in which samples of step STEP have a gradient that is far too large."""
    script = changed(
        "train.py",
        folder / "job.py",
        ("            loss = criterion(logits, targets)\n", POISON.replace("POISON", str(ids))),
    )
    run(script, *WORDS, f"--output_dir={folder}/run")
    return folder / "run"


def ids_of(folder) -> list[int]:
    run(*("jobs/train.py", *WORDS), "--max_steps=4", f"--output_dir={folder}/plain")
    return Run(str(folder / "plain")).sampler(STEP).batch(STEP - 1).tolist()


def find(folder, *words) -> str:
    printed = io.StringIO()
    with forked_jobs(), contextlib.redirect_stdout(printed):
        assert cli.main([str(folder), f"--step={STEP}", "--guilty", *words]) == 0
    return printed.getvalue()


@pytest.mark.thorough
def test_a_planted_sample_is_found_in_log2_replays(tmp_path):
    poison = ids_of(tmp_path)[77]
    folder = train(tmp_path, [poison])
    shown = find(folder)
    assert f"guilty: sample {poison}: " in shown
    replays = sum(1 for line in shown.splitlines() if line.startswith("replay "))
    assert replays <= math.log2(BATCH) + 3 and f"({replays} replays)" in shown
    assert f"replay 2: without {BATCH} samples of step {STEP}: " in shown
    assert "launch replay" in shown


@pytest.mark.thorough
def test_two_planted_samples_are_found(tmp_path):
    ids = ids_of(tmp_path)
    folder = train(tmp_path, [ids[3], ids[200]])
    shown = find(folder)
    assert f"guilty: samples {', '.join(map(str, sorted([ids[3], ids[200]])))}: " in shown, shown


@pytest.mark.thorough
def test_a_step_without_a_spike(tmp_path):
    folder = train(tmp_path, [])
    shown = find(folder, "--ahead=1")
    assert re.search(rf"step {STEP} .*no spike: .*\b5-5 ", shown)
    assert "is the last one" in refused("-m", "launch", "data", folder, "--step=10", "--guilty")
