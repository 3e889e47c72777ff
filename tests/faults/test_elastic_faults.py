"""train_exact.py --elastic for minutes: kills, a stopped process, signals, and the end of all processes."""

import os
import re
import signal

import pytest

from tests.conftest import names, run, wait_until
from tests.support.elastic import JOB, ElasticRun, slow_job
from tests.support.exact import facts

pytestmark = pytest.mark.thorough

OPTIONS = (*JOB, "--epochs=8", "--processes_per_node=3", "--elastic=true")


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the job with options. It ends with the test."""
    runs = []

    def begin(*options, pause: float = 0.05) -> ElasticRun:
        job = slow_job(tmp_path / "job.py", pause)
        runs.append(ElasticRun(job, *OPTIONS, f"--output_dir={tmp_path / 'elastic'}", *options))
        return runs[-1]

    yield begin
    for each in runs:
        each.kill()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the facts of an undisturbed run of one process."""
    output = tmp_path_factory.mktemp("whole")
    run("jobs/train_exact.py", *JOB, "--epochs=8", f"--output_dir={output}")
    return facts(output)


def test_eleven_kills():
    options = {
        "processes": 4,
        "width": 8,
        "seed": 1,
        "steps": 20,
        "kills": 11,
        "every_steps": 25,
        "pause": 0.1,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    printed = run("-m", "tests.benchmarks.elastic", *words, timeout=3600).stdout
    figures = {name: float(figure) for name, figure in re.findall(r"^(\S.*?) +([\d.]+)$", printed, re.M)}
    assert figures["generations"] > 10 and figures["lost processes"] > 12
    assert f"equal in {figures['last step']:.0f} steps" in printed


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_process_is_replaced_and_does_not_write(start, whole, tmp_path, rank):
    job = start()
    job.wait_until(lambda each: each.step >= 5)
    [pid] = job.signal(signal.SIGSTOP, rank)
    job.wait_until(lambda each: each.generation > 1)
    said = "\n".join(job.lines)
    assert pid not in job.pids and names(said, f"rank {rank} on node 0 is gone: stopped", "2 s")
    wait_until(lambda: not _lives(pid))  # its agent has ended it: it never continues
    assert job.finish() == 0
    assert facts(tmp_path / "elastic") == whole


def test_a_signal_to_all_saves_and_a_restart_goes_on(start, whole, tmp_path):
    job = start()
    job.wait_until(lambda each: each.step >= 7)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.finish() == 143
    assert "stopped as asked after step" in "\n".join(job.lines)
    again = start("--processes_per_node=2")
    assert again.finish() == 0
    assert _planned(tmp_path / "elastic", whole) == whole


def test_all_processes_die_and_a_restart_goes_on_from_a_checkpoint(start, whole, tmp_path):
    job = start("--save_every=3", pause=0.1)
    job.wait_until(lambda each: each.step >= 8)
    job.signal(signal.SIGKILL, 1)
    job.wait_until(lambda each: each.generation > 1)
    pids = [*job.pids]
    os.kill(job.process.pid, signal.SIGKILL)  # the agent of node 0
    wait_until(lambda: not any(map(_lives, pids)))
    again = start("--save_every=3", pause=0.0)
    assert again.finish() == 0
    assert "resumed from" in "\n".join(again.lines)
    assert _planned(tmp_path / "elastic", whole) == whole


def _planned(output, whole: dict) -> dict:
    """Return the facts of a run, without the states of steps at which the undisturbed run saves nothing."""
    own = facts(output)
    return own | {"state": {step: each for step, each in own["state"].items() if step in whole["state"]}}


def _lives(pid: int) -> bool:
    """Return whether a process runs: not one that has ended and that its parent has not waited for."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
