"""Count the cores that this process may use. This module imports no torch."""

import math
import os
from collections.abc import Iterable
from pathlib import Path


def available_cores(root: str = "/") -> int:
    """Return the number of cores of the CPU affinity, or of the control groups if that is less; at least 1. A
    quota is rounded up. root: see control_groups.py."""
    from bootfile.machine import control_groups  # when a run begins, not with `import bootfile`

    if hasattr(os, "sched_getaffinity"):
        cpus = os.sched_getaffinity(0)
    else:  # not Linux
        cpus = set(range(os.cpu_count() or 1))
    allowed = control_groups.allowed_cpus(root)
    count = len(cpus)
    if allowed:  # Linux binds a process to the CPUs of its group; a sandbox may not, or may renumber them
        count = min(count, len(allowed & cpus) or len(allowed))
    return max(1, math.ceil(min(count, control_groups.cpu_quota(root))))


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
        # two hardware threads of one core have the same pair of numbers
        parts = []
        for file in ("physical_package_id", "core_id"):
            try:
                parts.append(Path(folder, f"cpu{cpu}", "topology", file).read_text(encoding="ascii").strip())
            except OSError:  # not known: then the CPU counts as a core
                parts = [f"cpu{cpu}"]
                break
        cores.add(":".join(parts))
    return sorted(cores)
