"""`launch prove` says exact for an exact job, and notices each part that a restart leaves out."""

import re
import signal
from pathlib import Path

import psutil
import pytest

from common.ground.exits import BadInput
from datasets.folders import random_folder
from launch.prove import jobs
from tests.conftest import ROOT, environment, finish, run, start, wait_until

SCRIPT = Path(__file__).parent / "leaves_out.py"
PARTS = ("optimizer", "schedule", "position", "buffers", "ema")  # "random": see below


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
    assert "<h1>exact</h1>" in text and "--processes_per_node=2" in text and "<script" not in text
    refused = prove("jobs/train_ddp.py", "--to", ROOT / "README.md", code=2)
    assert "was not made by this command" in refused.stderr


@pytest.mark.faults
def test_a_sharded_job_is_exact(tmp_path):
    options = ("--width=8", "--batch_size=240", "--dataset=digits", "--max_steps=6", "--processes_per_node=2")
    shown = prove("jobs/train_fsdp.py", "--kills=1", "--", *options).stdout
    assert re.search(r"^exact: 3 runs equal the reference", shown, re.MULTILINE)
    assert "--processes_per_node=1" in shown and shown.count("\n      noticed") == 2


@pytest.mark.faults
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


FAILING = """
import os, sys, time, torch
if "--resume" in sys.argv:
    sys.exit("lost")
os.makedirs("OUT")
child = os.fork()
for step in range(STEPS):
    time.sleep(0.02)
    if child and step % 4 == 0:
        torch.save({"weight": torch.full((4,), float(step))}, "OUT/.last.pt")
        os.replace("OUT/.last.pt", "OUT/last.pt")  # a SIGKILL never leaves a cut file
"""


def failing(folder, steps):
    (folder / "own.py").write_text(FAILING.replace("STEPS", str(steps)))
    return "prove", "own.py", "--compare", "OUT/*.pt", "--resume_with=--resume"


def test_a_restart_that_fails_differs(tmp_path):
    words = failing(tmp_path, steps=200)[1:]  # long enough for a SIGKILL before the end, at any load
    shown = prove(*words, "--kills=1", cwd=tmp_path, code=20).stdout
    assert re.search(r"^differs: killed and restarted: own.py --resume ended with .*lost$", shown, re.M)
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]


def test_a_killed_proof_leaves_no_job(tmp_path):
    (tmp_path / "own.py").write_text(FAILING.replace("os.fork()", "1").replace("STEPS", str(10**6)))
    words = (ROOT / "launch" / "__main__.py", "prove", "own.py", "--compare", "OUT/*.pt", "--resume_with=-r")
    proof = start(*words, cwd=tmp_path, env=environment(TMPDIR=str(tmp_path)), fresh=True)
    wait_until((tmp_path / "OUT" / "last.pt").exists, proof)
    [job] = psutil.Process(proof.pid).children()
    proof.kill()
    finish(proof, -signal.SIGKILL)
    left = psutil.wait_procs([job], timeout=60)[1]
    for each in left:
        each.kill()
    assert not left


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_processes_of_the_job(number, code, tmp_path):
    words = failing(tmp_path, steps=10**6)
    (tmp_path / "kept").mkdir()
    command = (ROOT / "launch" / "__main__.py", *words)
    proof = start(*command, cwd=tmp_path, env=environment(TMPDIR=str(tmp_path / "kept")), fresh=True)
    wait_until((tmp_path / "OUT" / "last.pt").exists, proof)
    children = psutil.Process(proof.pid).children(recursive=True)
    proof.send_signal(number)
    finish(proof, code)
    assert len(children) == 2 and not psutil.wait_procs(children, timeout=10)[1]
    assert not (tmp_path / "OUT").exists() and not list((tmp_path / "kept").iterdir())


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


def test_a_script_that_does_not_know_help_is_ended(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("import time\nwhile True: time.sleep(1)")
    monkeypatch.setattr(jobs, "_HELP_SECONDS", 1)
    with pytest.raises(BadInput, match=r"own\.py --help did not end within 1 s"):
        jobs.OwnJob(str(tmp_path / "own.py"), [], str(tmp_path), 1)


@pytest.mark.faults
def test_a_script_that_ignores_its_checkpoint_is_unverified(tmp_path):
    shown = prove_script(tmp_path, "everything", 21).stdout
    assert "unverified: restarted from a damaged checkpoint: no difference was noticed" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.py"], "missing.py: no such file"),
        (["own.py", "--compare", "OUT/*.pt"], "together with --resume_with"),
        (["own.py"], "own.py --help ended with 1: no such option"),
        ([ROOT / "README.md"], "--help ended with 1: "),
        (["own.py", "--to", "none/proof.html"], "none is not a folder in which this user can write"),
        (["own.py", "--to", "full"], "full is a folder"),
        (["own.py", "--compare", "*.pt", "--resume_with=-r"], "expected files in a folder"),
        (["own.py", "--compare", "full/*.pt", "--resume_with=-r"], "full exists"),
        (["own.py", "--compare", "OUT/*.pt", "--resume_with=-r"], "ended with 1"),
        (["own.py", "--keep", "full", "--compare", "OUT/*.pt", "--resume_with=-r"], "full is not empty"),
        (["own.py", "--keep", "own.py"], "--keep own.py: File exists"),
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
