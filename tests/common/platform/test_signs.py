"""Without a sign of a platform no table is loaded, and every question has the answer that the tables give."""

import argparse
import random

import pytest

from common.platform import layout, place, platforms, signs
from common.platform.table import MPI, PROFILES, STARTS
from tests.conftest import QUICK, run

# Variables of platforms that users set, too. Alone they say nothing about the place of a process.
ORDINARY = {"MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "PYTHONUNBUFFERED"}
NAMES = {name for profile in PROFILES.values() for name in profile.variables}
NAMES |= {name for row in MPI.values() for name in row.split()} | {*STARTS, "AZUREML_NODE_COUNT"}
OTHERS = (  # of launchers that the table does not name, and of a user's shell
    "GROUP_RANK", "MACHINE_RANK", "NUM_MACHINES", "PE", "DMLC_WORKER_ID", "DMLC_NUM_WORKER", "PBS_NODENUM",
    "PMIX_RANK", "TF_CONFIG", "CLUSTER_SPEC", "TPU_WORKER_HOSTNAMES", "NODE_INDEX", "LSF_PM_TASKID",
    "XDG_SESSION_TYPE", "HOME", "OMP_NUM_THREADS", "NPROCS", "SIZE", "BOOTFILE_STARTED_BY",
)  # fmt: skip
VALUES = ("0", "1", "2", "", "a,b", '{"cluster": {"worker": ["a", "b"]}}')
PLAIN = argparse.Namespace(processes_per_node=None, init_method=None, rank=None, world_size=None)


@pytest.mark.parametrize("name", sorted(NAMES - ORDINARY))
def test_each_variable_of_the_table_is_a_sign(name):
    assert signs.are_set({name: "x"})


def test_a_file_of_sagemaker_is_a_sign(tmp_path, monkeypatch):
    monkeypatch.setattr(signs, "SAGEMAKER_CONFIG", str(tmp_path))
    assert not signs.are_set({"HOME": "/root"})
    (tmp_path / "resourceconfig.json").write_text("{}")
    assert signs.are_set({"HOME": "/root"})


def answers(module, env):
    return [
        module.recognised(env), module.default_grace(env), module.count_restarts(env),
        module.describe_starts(env), module.promised_gpus(env),
    ]  # fmt: skip


def test_without_a_sign_the_tables_would_give_the_same_answers():
    draw = random.Random(0)
    without = 0
    for _ in range(20_000):
        names = draw.sample(sorted(NAMES | {*OTHERS}), draw.choice((1, 2, 4)))
        env = {name: draw.choice(VALUES) for name in names}
        if signs.are_set(env):
            continue
        without += 1
        assert answers(place, env) == answers(platforms, env), env
        assert platforms.has_local_rank_0(env), env
        for gpus in (0, 2):
            assert place.resolve(PLAIN, env, gpus) == layout.resolve(PLAIN, env, gpus), env
    assert without > 500


def test_a_job_without_a_sign_loads_no_table(tmp_path):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['', *{QUICK}, '--epochs=0', '--output_dir', {str(tmp_path)!r}]\n"
        "try: runpy.run_path('jobs/train.py', run_name='__main__')\n"
        "finally: print('loaded:', *(name for name in sys.modules if name.startswith('common.platform.')))\n"
    )
    names = "layout", "platforms", "table"
    printed = run("-c", code, fresh=True, code=2).stdout
    assert "loaded: common.platform" in printed
    assert not any(f"common.platform.{name}" in printed for name in names)
