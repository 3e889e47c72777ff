"""`launch prove` says exact for an exact job, and notices each part that a restart leaves out."""

import re
from pathlib import Path

import pytest

from datasets.folders import random_folder
from tests.conftest import ROOT, run

SCRIPT = Path(__file__).parent / "leaves_out.py"
PARTS = ("optimizer", "schedule", "random", "position", "buffers", "ema")


def prove(*words, cwd=ROOT, code=0):
    return run(ROOT / "launch" / "__main__.py", "prove", *words, cwd=cwd, code=code, timeout=900)


def prove_script(folder, part, code, *words):
    return prove(
        SCRIPT, "--compare", "OUT/final.pt", "--resume_with", "--resume OUT/last.pt", *words,
        "--", "--out=OUT", f"--leave_out={part}", cwd=folder, code=code,
    )  # fmt: skip


def test_a_job_of_bootfile_is_exact(tmp_path):
    options = ("--width=8", "--batch_size=240", "--dataset=digits")
    page = tmp_path / "proof.html"
    shown = prove("jobs/train_ddp.py", "--kills=1", "--to", page, "--", *options, "--max_steps=12").stdout
    assert re.search(r"^exact: 3 runs equal the reference", shown, re.MULTILINE)
    assert re.search(r"SIGKILL after step \d+; continued from step \d+", shown)
    assert shown.count("data equal for 12 steps") == 4 and shown.count("\n      noticed") == 2
    assert "not checked: another engine: train_ddp.py has no --data_backend" in shown
    text = page.read_text()
    assert "<h1>exact</h1>" in text and "2 processes" in text and "<script" not in text
    refused = prove("jobs/train_ddp.py", "--to", ROOT / "README.md", code=2)
    assert "was not made by this command" in refused.stderr


def test_an_exact_job_has_the_same_bits_on_other_numbers_of_processes(tmp_path):
    options = ("--width=8", "--batch_size=240", "--dataset=digits", "--max_steps=6")
    shown = prove("jobs/train_exact.py", "--kills=1", "--", *options).stdout
    assert re.search(r"^exact: 4 runs .*; same bits on 1, 2 and 4 processes$", shown, re.MULTILINE)
    assert "--processes_per_node=4" in shown


def test_a_script_that_forgets_its_random_numbers_differs(tmp_path):
    shown = prove_script(tmp_path, "random", 20, "--keep", "runs").stdout
    assert re.search(r"^differs: killed and restarted: final.pt differs: ", shown, re.MULTILINE)
    assert "not checked: the samples" in shown and (tmp_path / "runs" / "reference" / "last.pt").exists()
    assert not (tmp_path / "OUT").exists()


@pytest.mark.faults
@pytest.mark.parametrize("part", ["nothing", *PARTS])
def test_what_a_script_leaves_out_is_noticed(part, tmp_path):
    shown = prove_script(tmp_path, part, 0 if part == "nothing" else 20).stdout
    assert ("exact" if part == "nothing" else "differs: killed and restarted: ") in shown


@pytest.mark.faults
def test_a_folder_of_images_is_read_by_another_engine(tmp_path):
    data = random_folder.make(str(tmp_path / "data"))
    options = ("--arch=resnet18", "--image_size=32", "--batch_size=64", "--max_steps=8", "--training_only")
    options += ("--data_backend=threads", f"--cache_dir={tmp_path / 'index'}")
    shown = prove("jobs/imagenet.py", "--kills=1", "--", f"--data_url={data}", *options).stdout
    assert re.search(r"^exact: 5 runs equal the reference", shown, re.MULTILINE)
    assert "another engine" in shown and "--data_backend=pytorch" in shown and "not checked" not in shown


@pytest.mark.faults
def test_a_script_that_ignores_its_checkpoint_is_unverified(tmp_path):
    shown = prove_script(tmp_path, "everything", 21).stdout
    assert "unverified: restarted from a damaged checkpoint: no difference was noticed" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.py"], "missing.py: no such file"),
        (["own.py", "--compare", "OUT/*.pt"], "together with --resume_with"),
        (["own.py"], "does not have Bootfile's options"),
        (["own.py", "--compare", "*.pt", "--resume_with=-r"], "expected files in a folder"),
        (["own.py", "--compare", "full/*.pt", "--resume_with=-r"], "full exists"),
        (["own.py", "--compare", "OUT/*.pt", "--resume_with=-r"], "ended with 1"),
        (["own.py", "--keep", "full", "--compare", "OUT/*.pt", "--resume_with=-r"], "full is not empty"),
        ([ROOT / "jobs" / "train.py", "--", "--output_dir=x"], "--output_dir is chosen for each run"),
        ([ROOT / "jobs" / "train.py", "--", "--max_steps=0"], "--max_steps"),
    ],
)
def test_bad_input_is_one_line(words, message, tmp_path):
    (tmp_path / "own.py").write_text("import sys; sys.exit('no such option')")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.pt").touch()
    result = prove(*words, cwd=tmp_path, code=2)
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "own.py"]
