"""torchrun restarts a job of two gloo processes of which one was killed: every time."""

import os
import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT, environment, free_port

pytestmark = pytest.mark.faults

JOB = (
    "jobs/train_ddp.py", "--dataset=digits", "--max_steps=12", "--batch_size=16", "--report_every=1",
    "--timeout=60",
)  # fmt: skip


def _process_of_rank(port, rank):
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:
            continue
        if f"MASTER_PORT={port}".encode() in variables and f"RANK={rank}".encode() in variables:
            return int(name)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.parametrize("attempt", range(20))
def test_a_killed_rank_is_restarted(attempt, tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3"]
    command += [f"--master-port={port}", *JOB, f"--output_dir={tmp_path}"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        killed, lines = False, []
        for line in process.stdout:
            lines.append(line)
            if not killed and f" step={1 + attempt % 8} " in line:
                os.kill(_process_of_rank(port, attempt % 2), signal.SIGKILL)
                killed = True
        assert process.wait(120) == 0, "".join(lines[-30:])
    assert killed and sum("test_accuracy=" in line for line in lines) == 1
