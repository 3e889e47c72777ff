"""A process uses the right number of cores, and its threads do not spin for long."""

import os

import pytest

from bootfile.machine.cores import available_cores
from launch.simulate import cli, job
from tests.conftest import environment, run
from tests.support.control_groups import make_tree

OWN = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "150000 100000\n"}, min(2, OWN)),
        ({"cpu.max": "max 100000\n"}, OWN),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, OWN),
        ({}, OWN),
    ],
)
def test_quota_of_the_control_group(files, expected, tmp_path):
    assert available_cores(make_tree(tmp_path, "", files)) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(("given", "spins"), [({}, "'1000'"), ({"GOMP_SPINCOUNT": "77"}, "'77'")])
def test_threads_of_a_job_do_not_spin_for_long(given, spins):
    """libgomp prints the value that it has read: the variable is set before torch is imported."""
    env = environment(OMP_DISPLAY_ENV="verbose", **given)
    shown = run("jobs/train.py", "--epochs=0", env=env, code=2).stderr
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("torch does not use libgomp here")
    assert f"GOMP_SPINCOUNT = {spins}" in shown


def test_simulated_nodes_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(job, "available_cores", lambda: 13)
    threads = []
    for layout in (["--nodes=3"], ["--nodes=3", "--processes=2"], ["--nodes=20"]):
        args = cli._parse_args([*layout, "jobs/train_ddp.py", "--", "--enable_gpu=false"])
        threads.append(job.Commands(args)._environment["OMP_NUM_THREADS"])
    assert threads == ["4", "2", "1"]
