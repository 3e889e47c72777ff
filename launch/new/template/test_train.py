"""A killed run continues exactly: its samples and its weights are those of an undisturbed run."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import torch

PROJECT = Path(__file__).resolve().parents[1]
OPTIONS = ["--max_steps=12", "--batch_size=32", "--report_every=1", "--save_every=4"]
OPTIONS += ["--processes_per_node=2"]  # only with --ddp
OPTIONS += [f"--data_url={PROJECT / 'common'}"]  # only with --text


def train(output_dir: Path, kill_at: int | None = None) -> str:
    """Run the job and return what it printed. kill_at: the step at which it is killed."""
    job = subprocess.Popen(
        [sys.executable, str(PROJECT / "jobs" / "train.py"), *OPTIONS, f"--output_dir={output_dir}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert job.stdout
    lines = []
    for line in job.stdout:
        lines.append(line)
        if re.search(rf" step={kill_at}/\d+ .* loss=", line):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.wait() == (-signal.SIGKILL if kill_at else 0), "".join(lines)
    return "".join(lines)


def test_a_killed_run_continues_exactly(tmp_path: Path) -> None:
    train(tmp_path / "whole")
    train(tmp_path / "killed", kill_at=9)  # step 8 is saved after step 4 is on disk
    assert re.search(r"resumed from .* step \d+ of 12", train(tmp_path / "killed"))
    receipts = [(tmp_path / run / "receipt.bin").read_bytes() for run in ("whole", "killed")]
    assert receipts[0] == receipts[1], "other samples, or in another order"
    weights = [torch.load(tmp_path / run / "best.pth", weights_only=True) for run in ("whole", "killed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
