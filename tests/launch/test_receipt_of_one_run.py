"""`launch receipt RUN` compares a run of Bootfile with what its seed, epochs and steps name."""

import re
import shutil

import numpy as np
import pytest

from bootfile.receipt import receipt
from bootfile.receipt.records import RECORD
from tests.conftest import refused, run, run_ranks

JOB = ("--dataset=digits", "--width=8", "--batch_size=128", "--epochs=2", "--enable_gpu=false")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    run_ranks("jobs/train_ddp.py", *JOB, f"--output_dir={folder}")
    return folder


def judge(folder, *words, code=0):
    [size, *lines] = run("-m", "launch", "receipt", folder, *words, code=code).stdout.splitlines()
    assert size == f"{folder}: 22 steps, 2 epochs"
    return lines


@pytest.mark.thorough
def test_a_right_run_gives_no_line(finished):
    assert judge(finished) == judge(finished, "--augmented") == []


def changed(finished, folder, places, values):
    """Copy a run, with the sums of some steps in place of others."""
    shutil.copytree(finished, folder)
    path = folder / receipt.FILE
    records = np.frombuffer(path.read_bytes(), RECORD).copy()
    records["sums"][places] = records["sums"][values]
    path.write_bytes(records.tobytes())
    return folder


def test_a_step_with_other_samples(finished, tmp_path):
    folder = changed(finished, tmp_path / "run", [16], [3])
    (line,) = judge(folder, code=1)
    assert re.match("unusual: step 17 .*other samples", line)
    assert judge(folder, "--repeats") == []


def test_two_epochs_in_one_order(finished, tmp_path):
    folder = changed(finished, tmp_path / "run", slice(11, 22), slice(11))
    first, second = judge(folder, "--augmented", code=1)[:2]
    assert first == "unusual: epochs 1 and 2 have the same order, from step 12 on"
    assert re.match("unusual: epochs 1 and 2 .*same content", second)


def test_records_that_do_not_name_the_samples(finished, tmp_path):
    shutil.copytree(finished, folder := tmp_path / "run")
    text = (folder / "starts.jsonl").read_text()
    (folder / "starts.jsonl").write_text(text.replace('"BatchSampler"', '"MySampler"'))
    [line] = judge(folder)
    assert line.startswith("not checked: ") and "MySampler" in line


def test_options_of_one_run_are_refused_for_two(finished):
    assert "one run" in refused("-m", "launch", "receipt", finished, finished, "--repeats")
