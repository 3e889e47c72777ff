"""The limits of a job are those of its own control group and of all groups above it, wherever these are."""

import json
import math
import os
import re

import pytest

from bootfile.machine import control_groups, cores
from common.platform import node
from tests.conftest import run
from tests.support.control_groups import enter, make_tree, real_group

GB = 10**9
SLURM = "slurm/uid_1000/job_7/step_0"
# an entry: /proc/self/cgroup, folder of the group below /sys/fs/cgroup
PLACES = {
    "root of a container": ("0::/\n", "."),
    "name with a colon": ("0::/system.slice/a:b.scope\n", "system.slice/a:b.scope"),
    "name of the host": ("0::/kubepods/pod1/c1\n", "."),
    "below the name of the host": ("0::/kubepods/pod1/c1/job\n", "job"),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_group_of_a_process_is_found(place, tmp_path):
    group, folder = PLACES[place]
    root = make_tree(tmp_path, group, {f"{folder}/cpu.max": "50000 100000\n"})
    assert control_groups.cpu_quota(root) == 0.5
    assert cores.available_cores(root) == 1


@pytest.mark.parametrize("limited", ["", "slurm/uid_1000", SLURM])
@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_limit_on_the_way_up_counts(version, limited, tmp_path):
    texts = {  # of each group: (with a limit, without one)
        2: {
            "cpu.max": ("150000 100000", "max 100000"),
            "memory.max": (3 * GB, "max"), "memory.current": (GB, GB),
            "pids.max": (64, "max"), "pids.current": (4, 4),
        },
        1: {
            "cpu,cpuacct/cpu.cfs_quota_us": (150000, -1), "cpu,cpuacct/cpu.cfs_period_us": (100000, 100000),
            "memory/memory.limit_in_bytes": (3 * GB, 2**63 - 4096), "memory/memory.usage_in_bytes": (GB, GB),
            "pids/pids.max": (64, "max"), "pids/pids.current": (4, 4),
        },
    }  # fmt: skip
    files = {}
    for level in ("", "slurm", "slurm/uid_1000", "slurm/uid_1000/job_7", SLURM):
        for path, text in texts[version].items():
            tree, _, name = path.rpartition("/")
            files[f"{tree}/{level}/{name}"] = f"{text[level != limited]}\n"
    names = ("cpuacct,cpu", "cpuset", "memory", "pids", "name=systemd")
    groups = "".join(f"{number}:{name}:/{SLURM}\n" for number, name in enumerate(names, 1))
    root = make_tree(tmp_path, f"0::/{SLURM}\n" if version == 2 else f"{groups}0::/\n", files)
    assert control_groups.cpu_quota(root) == 1.5
    assert node.available_memory(root) == 2 * GB
    [limit] = control_groups.process_limits(root)
    assert limit.most == 64 and limit.used == 4 and limit.name.endswith(f"{limited}")


def test_both_versions_on_one_node(tmp_path):
    """As systemd mounts them in "hybrid" mode."""
    files = {
        "memory/a/memory.limit_in_bytes": "5000", "memory/a/memory.usage_in_bytes": "1000",
        "cpu,cpuacct/b/cpu.cfs_quota_us": "50000", "cpu,cpuacct/b/cpu.cfs_period_us": "100000",
        "unified/c/cpu.max": "25000 100000",
    }  # fmt: skip
    root = make_tree(tmp_path, "3:memory:/a\n2:cpu,cpuacct:/b\n0::/c\n", files)
    assert node.available_memory(root) == 4000 and control_groups.cpu_quota(root) == 0.25


def test_groups_of_others_do_not_count(tmp_path):
    files = {"a/cpu.max": "50000 100000", "a/b/c/cpu.max": "50000 100000", "b/pids.max": "9"}
    root = make_tree(tmp_path, "0::/b\n", files)
    assert control_groups.cpu_quota(root) == math.inf


@pytest.mark.parametrize("group", ["0::/../b\n", "0::/..\n", "4:cpu,cpuacct:/../b\n"])
def test_a_group_outside_of_the_namespace_is_not_known(group, tmp_path):
    """cgroup_namespaces(7): its name begins with /.. and the groups of other names are those of others."""
    files = {"b/cpu.max": "50000 100000", "../b/cpu.max": "50000 100000", "../cpu.max": "50000 100000"}
    files["cpu,cpuacct/b/cpu.max"] = "50000 100000"
    assert control_groups.cpu_quota(make_tree(tmp_path, group, files)) == math.inf


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"memory.max": "9000", "memory.high": "5000", "memory.current": "1000"}, 4000),
        ({"memory.max": "max", "memory.high": "max", "memory.current": "1000"}, math.inf),
        ({"memory.max": "900", "memory.current": "1000"}, 0),
        (  # the cache of files is freed when memory is needed
            {
                "memory.max": "9000", "memory.current": "8000",
                "memory.stat": "anon 500\nfile 7500\ninactive_file 5000\nactive_file 1500\n",
            },
            7500,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "9000", "memory/memory.usage_in_bytes": "8000",
                "memory/memory.stat": "inactive_file 1\nactive_file 1\ntotal_inactive_file 5000\n"
                "total_active_file 1500\n",
            },
            7500,
        ),
        ({}, math.inf),
    ],
)  # fmt: skip
def test_memory_that_the_group_still_gets(files, expected, tmp_path):
    assert node.available_memory(make_tree(tmp_path, "", files)) == expected


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"cpuset.cpus.effective": "0-1,7\n"}, {0, 1, 7}),
        ({"cpuset/cpuset.effective_cpus": "2-3\n", "cpuset/cpuset.cpus": "2-9\n"}, {2, 3}),
        ({"cpuset/cpuset.cpus": "5"}, {5}),
        ({"cpuset.cpus": ""}, None),
        ({}, None),
    ],
)
def test_cpus_of_the_group(files, expected, tmp_path):
    root = make_tree(tmp_path, "", files)
    assert control_groups.allowed_cpus(root) == expected
    assert 1 <= cores.available_cores(root) <= len(expected or os.sched_getaffinity(0))


SHOW = """
import json
from bootfile.machine import control_groups, cores
from common.platform import node
print(json.dumps([control_groups.cpu_quota(), cores.available_cores(), node.available_memory(),
                  [limit.most for limit in control_groups.process_limits()]]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "controller, settings",
    [
        ("cpu", {"cpu.max": "50000 100000", "cpu.cfs_quota_us": "50000"}),
        ("memory", {"memory.max": "1500000000", "memory.limit_in_bytes": "1500000000"}),
        ("pids", {"pids.max": "77"}),
    ],
)
def test_a_real_group(controller, settings):
    """The process is in a group below the one that has the limit."""
    with real_group(controller, settings) as folder:
        shown = run("-c", SHOW, fresh=True, preexec_fn=lambda: enter(folder)).stdout
    quota, available, memory, processes = json.loads(shown)
    if controller == "cpu":
        assert (quota, available) == (0.5, 1)
    elif controller == "memory":
        assert 0 < memory < 1.5 * GB
    else:
        assert 77 in processes


LARGE = """
import torch
from common.distributed.entry import entry
from common.platform import node
layers = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU())
entry(lambda: node.check_memory(layers, (3, 224, 224), 1000))()
"""


@pytest.mark.thorough
def test_a_step_that_does_not_fit_into_the_group_is_refused():
    """Without the line, the kernel kills the job."""
    limits = {"memory.max": "1500000000", "memory.limit_in_bytes": "1500000000"}
    with real_group("memory", limits) as folder:
        job = run("-c", LARGE, fresh=True, preexec_fn=lambda: enter(folder), code=2)
    assert "error: a step with 1000 samples" in job.stderr
    assert re.search(r" [01]\.\d GB .*free\b.*\b\d+ samples fit", job.stderr)
