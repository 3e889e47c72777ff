"""torchrun restarts a job of two gloo processes each time one of them is killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import QUICK, ROOT, environment, free_port, processes_of, start
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


def test_a_killed_rank_of_a_second_agent_is_restarted_once(tmp_path):
    """Each agent counts its restarts: that of the killed rank one more than the other one, whose ranks it
    stops. Rank 0 must not read what is left of the first start in the store of the agents."""
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1")
    torchrun = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1")
    command = [sys.executable, *torchrun, *rendezvous, *JOB, f"--output_dir={tmp_path / 'out'}"]
    logs = [tmp_path / name for name in ("first", "second")]
    agents = []
    for log in logs:
        with log.open("w") as file:
            options = {"stdout": file, "stderr": subprocess.STDOUT}
            agents.append(subprocess.Popen(command, cwd=ROOT, env=environment(), **options))
    while not any(" step=2/" in log.read_text() for log in logs):
        assert all(agent.poll() is None for agent in agents), logs[0].read_text() + logs[1].read_text()
        time.sleep(0.1)
    if " step=" in logs[1].read_text():  # the agent that came later may have rank 0
        agents.reverse()
        logs.reverse()
    [rank_0], [rank_1] = map(processes_of, agents)
    os.kill(rank_0, signal.SIGSTOP)  # else it may end by itself: then its agent counts, too
    os.kill(rank_1, signal.SIGKILL)
    while "closing signal SIGTERM" not in logs[0].read_text():
        time.sleep(0.1)
    os.kill(rank_0, signal.SIGCONT)
    codes = [agent.wait(300) for agent in agents]
    text = logs[0].read_text() + logs[1].read_text()
    assert codes == [0, 0], text[-3000:]
    assert text.count("test_accuracy=") == 1
    assert text.count("starts TORCHELASTIC_RESTART_COUNT=") == 4, "each rank is started once more"
