"""A job with --elastic true on 4 nodes: processes that are killed, a node that is paused, and a cut link."""

import re
import signal
import subprocess
import time

import pytest

from tests.conftest import LONGEST, free_port, run
from tests.support.elastic import JOB, ElasticRun, slow_job, wait_for_file, wait_for_members
from tests.support.exact import facts
from tests.support.network import LINK, namespace, needs_namespace
from tests.support.simulated import fired, rows, simulate

pytestmark = pytest.mark.thorough

NODES, CUT = 4, 5  # CUT: seconds
LENGTH = ("--max_steps=40", "--save_every=5step")
ELASTIC = (*JOB, *LENGTH, "--elastic=true")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the facts of a run of one process."""
    output = tmp_path_factory.mktemp("whole")
    run("jobs/train_exact.py", *JOB, *LENGTH, f"--output_dir={output}")
    return facts(output)


@pytest.mark.parametrize("platform", ["modelarts", "pai-dlc"])
def test_processes_that_are_killed(platform, whole, tmp_path):
    fault = "kill:every=11step"
    command = (f"--nodes={NODES}", "--platform", platform, "--fault", fault)
    job = slow_job(tmp_path / "job.py", 0.05)
    output = simulate(
        *command, job, "--", *ELASTIC, f"--train_url={tmp_path / 'run'}", timeout=2 * LONGEST
    ).stdout
    assert fired(output, fault) and [row.code for row in rows(output).values()] == [0] * NODES, output
    assert re.search(r"rank \d on node \d is gone: SIGKILL; ", output)
    assert facts(tmp_path / "run") == whole


def test_a_node_that_is_paused(whole, tmp_path):
    fault = "pause:node=2,step=3,for=6s"
    command = (f"--nodes={NODES}", "--fault", fault)
    job = slow_job(tmp_path / "job.py", 0.1, wait_for_members(30, NODES))
    output = simulate(
        *command, job, "--", *ELASTIC, f"--train_url={tmp_path / 'run'}", timeout=2 * LONGEST
    ).stdout
    assert fired(output, fault) and [row.code for row in rows(output).values()] == [0] * NODES, output
    assert re.search(r"rank \d on node 2 is gone: .*heartbeat .*\b2 s; ", output)
    assert "1 process joined on node 2; " in output.partition("SIGCONT to node 2\n")[2]
    assert facts(tmp_path / "run") == whole


def test_a_node_that_is_taken_back(whole, tmp_path):
    """SIGTERM to the agent of one node, and nothing to the other one."""
    job = slow_job(tmp_path / "job.py", 0.05)
    address = (
        f"--init_method=tcp://127.0.0.1:{free_port()}",
        "--world_size=2",
        f"--output_dir={tmp_path / 'run'}",
    )
    runs = [ElasticRun(job, *ELASTIC, *address, f"--rank={rank}") for rank in range(2)]
    try:
        first, second = runs
        first.wait_until(lambda run: run.step >= 3)
        second.process.send_signal(signal.SIGTERM)
        assert second.finish() == 143, "\n".join(second.lines)
        assert first.finish() == 0, "\n".join(first.lines)
    finally:
        for each in runs:
            each.kill()
    assert re.search(r"process 1\.\d+ leaves, .*1 process continues .*step ", "\n".join(first.lines))
    assert facts(tmp_path / "run") == whole


def test_a_node_that_is_lost_and_comes_back(whole, tmp_path):
    """SIGKILL to the agent of one node: its processes end with it. Later the node is started again."""
    job = slow_job(tmp_path / "job.py", 0.05, wait_for_members(30, 2))
    address = (f"--init_method=tcp://127.0.0.1:{free_port()}", "--world_size=2")
    output = f"--output_dir={tmp_path / 'run'}"
    runs = [ElasticRun(job, *ELASTIC, *address, output, f"--rank={rank}") for rank in range(2)]
    try:
        first = runs[0]
        first.wait_until(lambda run: run.step >= 3)
        runs[1].process.kill()
        first.wait_until(lambda run: len(run.pids) == 1)
        runs.append(ElasticRun(job, *ELASTIC, *address, output, "--rank=1"))
        first.wait_until(lambda run: len(run.pids) == 2)
        assert [first.finish(), runs[2].finish()] == [0, 0], "\n".join(first.lines)
    finally:
        for each in runs:
            each.kill()
    assert facts(tmp_path / "run") == whole


@needs_namespace
def test_a_link_that_is_cut(whole, tmp_path):
    """All nodes are cut off from each other, as the agents are from the store."""
    cut = tmp_path / "cut"
    job = slow_job(tmp_path / "job.py", 0.0, wait_for_file(5, cut))
    address = (f"--init_method=tcp://127.0.0.1:{free_port()}", f"--world_size={NODES}")
    with namespace() as inside:
        runs = [
            ElasticRun(
                job, *ELASTIC, *address, f"--rank={rank}", f"--output_dir={tmp_path / 'run'}", prefix=inside
            )
            for rank in range(NODES)
        ]
        try:
            first = runs[0]
            first.wait_until(lambda run: run.step >= 5)
            subprocess.run([*inside, *LINK, "down"], check=True)
            cut.touch()
            time.sleep(CUT / 2)
            step = first.step
            time.sleep(CUT / 2)
            assert first.step == step < 40 and not [run for run in runs if run.process.poll() is not None]
            subprocess.run([*inside, *LINK, "up"], check=True)
            codes = [run.finish() for run in runs]
            assert codes == [0] * NODES, "\n".join(line for run in runs for line in run.lines)
        finally:
            for each in runs:
                each.kill()
    assert facts(tmp_path / "run") == whole
