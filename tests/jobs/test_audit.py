"""An audit and a fork of an unaltered run of each job find it equal, with the job's own defaults."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.conftest import QUICK, cases, environment, run
from tests.support.proofs import audit

SAVES = ("--save_every=2", "--keep_every=2", "--max_steps=4")
DIGITS = (*QUICK, "--batch_size=64")
PROCESSES = "--processes_per_node=2"
JOBS = {
    "train": ("jobs/train.py", *DIGITS),
    "train_dp": ("jobs/train_dp.py", *DIGITS),
    "train_ddp": ("jobs/train_ddp.py", *DIGITS, PROCESSES),
    "train_amp": ("jobs/train_amp.py", *DIGITS),
    "train_fast": ("jobs/train_fast.py", "--dataset=digits", "--batch_size=64"),
    "train_exact": ("jobs/train_exact.py", *DIGITS, "--exact_shards=2", PROCESSES),
    "train_fsdp": ("jobs/train_fsdp.py", *DIGITS, PROCESSES),
    "train_fsdp in parts": ("jobs/train_fsdp.py", *DIGITS, PROCESSES, "--checkpoint_format=sharded"),
    "train_own": ("jobs/train_own.py", "--batch_size=16"),
    "train_text": (
        "jobs/train_text.py", "--data_url=datasets/memory", "--layers=1", "--heads=2", "--width=16",
        "--context=32", "--batch_size=16",
    ),
    "imagenet": ("jobs/imagenet.py", "--arch=shufflenet_v2_x0_5"),
    "imagenet of timm": ("jobs/imagenet.py", "--model=resnet18"),
    "imagenet without timm": ("jobs/imagenet.py", "--arch=resnet18"),
    "imagenet in shards": ("jobs/imagenet.py", "--arch=resnet18", "--exact_shards=2", PROCESSES),
}  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Return a folder of images of two classes."""
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(1)
    for split in ("train", "val"):
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)
            for number in range(16):
                pixels = random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def no_timm(tmp_path_factory):
    """Return an environment in which timm cannot be imported."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "timm").mkdir()
    (folder / "timm" / "__init__.py").write_text("raise ImportError('not here')\n")
    return environment(PYTHONPATH=str(folder))


@pytest.mark.parametrize("name", cases(JOBS, *sorted(JOBS.keys() - {"imagenet"})))
def test_a_run_of_a_job_is_equal(name, images, no_timm, tmp_path, monkeypatch):
    env = environment()
    if name == "imagenet of timm":
        pytest.importorskip("timm")
    if name == "imagenet without timm":
        env = no_timm
        monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])
    words = JOBS[name]
    if "imagenet" in name:
        words = (
            *words,
            f"--data_url={images}",
            "--image_size=64",
            "--batch_size=8",
            "--lr=0.01",
            "--workers=1",
        )
    old = tmp_path / "old"
    run(*words, *SAVES, f"--output_dir={old}", env=env)
    result = tmp_path / "audit.json"
    audit(old, "--share=all", "--to", result)
    intervals = json.loads(result.read_text())["computed"]
    assert [(each["before"], each["last"]) for each in intervals] == [(0, 2), (2, 4)]
    assert all(each["difference"] == "" and each["samples"] == 2 for each in intervals)

    new = ("--from", old, "--at_step=3", f"--output_dir={tmp_path / 'new'}")
    processes = [word for word in words if word == PROCESSES]
    shown = run(words[0], *new, *processes, env=env).stdout
    assert "the samples of 1 step" in shown
    compared = run("-m", "launch", "receipt", old, tmp_path / "new").stdout
    assert "data equal" in compared and "state equal at step 4" in compared
