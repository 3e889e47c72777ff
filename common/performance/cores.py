"""Count the CPU cores that this process may use: a container often gets a part of the machine."""

import math
import os

_CGROUPS = "/sys/fs/cgroup"


def available(cgroups: str = _CGROUPS) -> int:
    """Return the cores of the CPU affinity, or of the control group's quota if that is less; at least 1.

    cgroups: where control groups are mounted. A quota is rounded up. Source: Linux, admin-guide/cgroup-v2.rst
    (cpu.max) and scheduler/sched-bwc.rst (cpu.cfs_quota_us).
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _numbers(cgroups, "cpu.max") or _numbers(cgroups, "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
    if quota and quota[0] > 0 and quota[1] > 0:
        count = min(count, math.ceil(quota[0] / quota[1]))
    return max(1, count)


def _numbers(folder: str, *names: str) -> list[int] | None:
    """Return (quota, period) in microseconds; None if there is no file or no limit."""
    try:
        words = []
        for name in names:
            with open(os.path.join(folder, name), encoding="ascii") as file:
                words += file.read().split()
        return [int(word) for word in words] if len(words) == 2 else None
    except (OSError, ValueError):  # "max": no limit
        return None
