import os

import pytest

from common.platforms import available_cores

OWN = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "150000 100000\n"}, min(2, OWN)),
        ({"cpu.max": "max 100000\n"}, OWN),
        ({"cpu.max": "6400000 100000\n"}, min(64, OWN)),
        ({"cpu.max": "nonsense"}, OWN),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, OWN),
        ({"cpu/cpu.cfs_quota_us": "100000\n"}, OWN),
        ({}, OWN),
    ],
)
def test_quota_of_the_control_group(files, expected, tmp_path):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert available_cores(str(tmp_path)) == expected


def test_affinity():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no CPU affinity here")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
