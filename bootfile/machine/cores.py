"""Count the cores that this process may use. This module imports no torch."""

import contextlib
import math
import os
from collections.abc import Iterable
from pathlib import Path


def available_cores(cgroups: str = "/sys/fs/cgroup") -> int:
    """Return the number of cores of the CPU affinity, or of the control group's quota if that is less; at
    least 1. A quota is rounded up.

    cgroups: the folder where control groups are mounted. Source: Linux, admin-guide/cgroup-v2.rst (cpu.max)
    and scheduler/sched-bwc.rst (cpu.cfs_quota_us).
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:  # not Linux
        count = os.cpu_count() or 1
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
            texts = [Path(cgroups, name).read_text(encoding="ascii") for name in names]
            quota, period = map(int, " ".join(texts).split())  # microseconds
            if quota > 0 and period > 0:
                count = min(count, math.ceil(quota / period))
    return max(1, count)


def physical_cores(cpus: Iterable[int] | None = None, folder: str = "/sys/devices/system/cpu") -> list[str]:
    """Return a name for each physical core of these CPUs, sorted. Hardware threads of one core count once.

    cpus: numbers of CPUs as Linux counts them; default: those that this process may use.
    """
    if cpus is None:
        if hasattr(os, "sched_getaffinity"):
            cpus = os.sched_getaffinity(0)
        else:  # not Linux
            cpus = range(os.cpu_count() or 1)
    cores = set()
    for cpu in cpus:
        parts = []
        for file in ("physical_package_id", "core_id"):
            try:
                parts.append(Path(folder, f"cpu{cpu}", "topology", file).read_text(encoding="ascii").strip())
            except OSError:  # not known: then the CPU counts as a core
                parts = [f"cpu{cpu}"]
                break
        cores.add(":".join(parts))
    return sorted(cores)
