"""torchrun restarts a job of two gloo processes each time one of them is killed."""

import os
import signal
import subprocess

import pytest

from tests.conftest import QUICK, free_port, processes_of, start
from tests.support.repeats import repeats

pytestmark = pytest.mark.thorough

JOB = (
    "jobs/train_ddp.py", *QUICK, "--max_steps=12", "--batch_size=16", "--report_every=1",
    "--timeout=60",
)  # fmt: skip


@pytest.mark.parametrize("attempt", range(repeats(8, 2)))
def test_a_killed_rank_is_restarted(attempt, tmp_path):
    port = free_port()
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3"]
    command += [f"--master-port={port}", *JOB, f"--output_dir={tmp_path}"]
    process = start(*command, stderr=subprocess.STDOUT)
    killed, lines = False, []
    for line in process.stdout:
        lines.append(line)
        if not killed and f" step={1 + attempt % 8}/" in line:
            os.kill(processes_of(process)[attempt % 2], signal.SIGKILL)
            killed = True
    assert process.wait(120) == 0, "".join(lines[-30:])
    assert killed and sum("test_accuracy=" in line for line in lines) == 1
