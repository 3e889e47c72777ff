"""A run that does not move says where its ranks are: under torchrun, with a node that is cut off, and with
--elastic true."""

import re
import signal
import subprocess
import sys

import psutil
import pytest

from tests.bootfile.processes.test_stuck import LOOP, line_of, read_line
from tests.conftest import ROOT, environment, finish, free_port, read_until, start
from tests.support.elastic import JOB, ElasticRun, slow_job
from tests.support.network import cut, needs_namespace, two_nodes

pytestmark = pytest.mark.thorough


@pytest.fixture
def loop(tmp_path):
    """Return the words of the loop of test_stuck.py, and the file that hangs its last rank in its data."""
    script = tmp_path / "own.py"
    script.write_text(LOOP.replace("ROOT", repr(str(ROOT))))
    return (script, "data", 2.0, tmp_path / "hang"), tmp_path / "hang"


def test_torchrun(loop, tmp_path):
    words, hang = loop
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    job = start(*launcher, *words, cwd=tmp_path, fresh=True)
    read_until(job, "^step 40")
    hang.touch()
    read_line(
        job, r"rank 0 (waits|is) in \w+ \(", re.escape(f"rank 1 is in __getitem__ (own.py:{line_of('0.1)')})")
    )
    hang.unlink()
    read_until(job, "^the run moves again")
    assert len(list((tmp_path / "OUT" / "stuck").iterdir())) == 2
    job.send_signal(signal.SIGTERM)  # it ends its ranks
    finish(job, None)


@needs_namespace
@pytest.mark.parametrize("kind", ["cut off", "killed"])
def test_the_only_rank_of_a_node_is_lost(loop, tmp_path, kind):
    """No process of its node can tell it."""
    words, _ = loop
    with two_nodes() as (nodes, address):
        port = str(free_port())
        jobs = []
        for rank, node in enumerate(nodes):
            variables = environment(
                RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", MASTER_ADDR=address,
                MASTER_PORT=port, GLOO_SOCKET_IFNAME="veth0",
            )  # fmt: skip
            command = [*node, "env", f"--chdir={tmp_path}", sys.executable, *map(str, words)]
            pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            jobs.append(subprocess.Popen(command, env=variables, **pipes))
        read_until(jobs[0], "^step 40")
        if kind == "cut off":
            cut(nodes[1])
            read_line(
                jobs[0], r"rank 0 on node node-a (waits|is) in \w+ \(", r"rank 1 on node node-b is silent"
            )
        else:
            for process in psutil.Process(jobs[1].pid).children():  # nsenter has started them
                process.kill()
            read_until(jobs[0], "^rank 1 on node node-b has ended")
    for job in jobs:
        finish(job, None)


def test_an_elastic_job(tmp_path):
    hang = tmp_path / "hang"
    waits = f"while rank == 1 and os.path.exists({str(hang)!r}): __import__('time').sleep(0.05)"
    script = slow_job(tmp_path / "job.py", 0.0, waits)
    options = ("--elastic=true", "--processes_per_node=2", "--epochs=1000", "--stuck_after=2")
    job = ElasticRun(script, *JOB, *options, f"--output_dir={tmp_path / 'run'}")
    try:
        job.wait_until(lambda run: run.step >= 3 and len(run.pids) == 2)
        hang.touch()
        place = "rank 1 is in main (job.py:"
        job.wait_until(lambda run: any("stuck for" in line and place in line for line in run.lines))
        hang.unlink()
        step = job.step
        job.wait_until(lambda run: run.step > step)
    finally:
        job.kill()
