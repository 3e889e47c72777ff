"""Count the cores that this process may use. This module imports no torch."""

import math
import os
from collections.abc import Iterable
from pathlib import Path


def available_cores(root: str = "/") -> int:
    """Return the number of cores of the CPU affinity, or of the control groups if that is less; at least 1. A
    quota is rounded up. root: see control_groups.py."""
    from bootfile.machine import control_groups  # when a run begins, not with `import bootfile`

    cpus = _affinity()
    # Linux binds a process to the CPUs of its group; a sandbox may not, or may renumber them
    allowed = control_groups.allowed_cpus(root) or cpus
    count = min(len(cpus), len(allowed & cpus) or len(allowed))
    return max(1, math.ceil(min(count, control_groups.cpu_quota(root))))


def _affinity() -> set[int]:
    """Return the CPUs that this process may use; all on a system that is not Linux."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def physical_cores(cpus: Iterable[int] | None = None, folder: str = "/sys/devices/system/cpu") -> list[str]:
    """Return a name for each physical core of these CPUs, sorted. Hardware threads of one core count once.

    cpus: numbers of CPUs as Linux counts them; default: those that this process may use.
    """
    cores = set()
    for cpu in _affinity() if cpus is None else cpus:
        # two hardware threads of one core have the same pair of numbers
        files = [Path(folder, f"cpu{cpu}/topology/{name}") for name in ("physical_package_id", "core_id")]
        try:
            cores.add(":".join(file.read_text(encoding="ascii").strip() for file in files))
        except OSError:  # not known: then the CPU counts as a core
            cores.add(f"cpu{cpu}")
    return sorted(cores)
