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


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a node of the job. All nodes end with the test."""
    runs, address = [], f"--init_method=tcp://127.0.0.1:{free_port()}"

    def begin(job, rank: int, nodes: int = 2, **more) -> ElasticRun:
        place = (address, f"--world_size={nodes}", f"--rank={rank}", f"--output_dir={tmp_path / 'run'}")
        runs.append(ElasticRun(job, *ELASTIC, *place, **more))
        return runs[-1]

    yield begin
    for each in runs:
        each.kill()


def simulate_fault(job, fault: str, folder, *more: str) -> str:
    """Return the output of a job on NODES nodes with this fault, after which all nodes have ended well."""
    command = (f"--nodes={NODES}", "--fault", fault, *more, job, "--", *ELASTIC, f"--train_url={folder}")
    output = simulate(*command, timeout=2 * LONGEST).stdout
    assert fired(output, fault) and [row.code for row in rows(output).values()] == [0] * NODES, output
    return output


@pytest.mark.parametrize("platform", ["modelarts", "pai-dlc"])
def test_processes_that_are_killed(platform, whole, tmp_path):
    job = slow_job(tmp_path / "job.py", 0.05)
    output = simulate_fault(job, "kill:every=11step", tmp_path / "run", "--platform", platform)
    assert re.search(r"rank \d on node \d is gone: SIGKILL; ", output)
    assert facts(tmp_path / "run") == whole


def test_a_node_that_is_paused(whole, tmp_path):
    job = slow_job(tmp_path / "job.py", 0.1, wait_for_members(30, NODES))
    output = simulate_fault(job, "pause:node=2,step=3,for=6s", tmp_path / "run")
    assert re.search(r"rank \d on node 2 is gone: .*heartbeat .*\b2 s; ", output)
    assert "1 process joined on node 2; " in output.partition("SIGCONT to node 2\n")[2]
    assert facts(tmp_path / "run") == whole


def test_a_node_that_is_taken_back(start, whole, tmp_path):
    """SIGTERM to the agent of one node, and nothing to the other one."""
    job = slow_job(tmp_path / "job.py", 0.05)
    first, second = (start(job, rank) for rank in range(2))
    first.wait_until(lambda run: run.step >= 3)
    second.process.send_signal(signal.SIGTERM)
    assert second.finish() == 143, "\n".join(second.lines)
    assert first.finish() == 0, "\n".join(first.lines)
    assert re.search(r"process 1\.\d+ leaves, .*1 process continues .*step ", "\n".join(first.lines))
    assert facts(tmp_path / "run") == whole


def test_a_node_that_is_lost_and_comes_back(start, whole, tmp_path):
    """SIGKILL to the agent of one node: its processes end with it. Later the node is started again."""
    job = slow_job(tmp_path / "job.py", 0.05, wait_for_members(30, 2))
    first, second = (start(job, rank) for rank in range(2))
    first.wait_until(lambda run: run.step >= 3)
    second.process.kill()
    first.wait_until(lambda run: len(run.pids) == 1)
    again = start(job, 1)
    first.wait_until(lambda run: len(run.pids) == 2)
    assert [first.finish(), again.finish()] == [0, 0], "\n".join(first.lines)
    assert facts(tmp_path / "run") == whole


@needs_namespace
def test_a_link_that_is_cut(start, whole, tmp_path):
    """All nodes are cut off from each other, as the agents are from the store."""
    cut = tmp_path / "cut"
    job = slow_job(tmp_path / "job.py", 0.0, wait_for_file(5, cut))
    with namespace() as inside:
        runs = [start(job, rank, NODES, prefix=inside) for rank in range(NODES)]
        runs[0].wait_until(lambda run: run.step >= 5)
        subprocess.run([*inside, *LINK, "down"], check=True)
        cut.touch()
        time.sleep(CUT / 2)
        step = runs[0].step
        time.sleep(CUT / 2)
        assert runs[0].step == step < 40 and not [run for run in runs if run.process.poll() is not None]
        subprocess.run([*inside, *LINK, "up"], check=True)
        codes = [run.finish() for run in runs]
        assert codes == [0] * NODES, "\n".join(line for run in runs for line in run.lines)
    assert facts(tmp_path / "run") == whole
