"""Read the limits that the control groups of this process set: cores, processes and threads.

A group may be far below the root: Slurm, systemd-run and Kubernetes make one for each job. /proc/self/cgroup
names the groups of this process. Each group also obeys the limits of the groups above it, so the smallest one
counts. Version 2 has one tree of groups, version 1 has one for each controller, and a node may have both.

Takes the trees below /sys/fs/cgroup: version 2 there or in `unified`, version 1 in a folder with the name of
its controllers. Outside: trees that are mounted elsewhere; their limits are not known.
root: the folder that has proc and sys; another one than / in tests. This module imports no torch.
Source: Linux, admin-guide/cgroup-v2.rst and admin-guide/cgroup-v1; cgroups(7).
"""

import contextlib
import math
from pathlib import Path
from typing import NamedTuple


class ProcessLimit(NamedTuple):
    """A limit of the number of processes and threads, which count alike. used: those that run now. name: of
    the setting."""

    most: int
    used: int
    name: str


def find_folders(controller: str, root: str = "/") -> list[Path]:
    """Return the folders with the files of the groups that limit this process: its own, then those above it.

    controller: "cpu", "cpuset", "memory" or "pids". A group above the mount is not visible, as in most
    containers.
    """
    groups = {}  # of version 1 by controller, of version 2 by ""
    for line in read_text(Path(root, "proc/self/cgroup")).splitlines():
        _, controllers, group = line.split(":", 2)  # such as "4:cpu,cpuacct:/slurm/job_7"
        groups.update(dict.fromkeys(controllers.split(","), group))
    # a node may have both versions, as with a controller that version 2 has left to version 1: both limit
    top = Path(root, "sys/fs/cgroup")
    trees = [(top, ""), (top / "unified", "")]
    trees += [
        (tree, controller) for tree in top.glob(f"*{controller}*") if controller in tree.name.split(",")
    ]
    return [folder for tree, name in trees for folder in _list_folders(tree, groups.get(name, "/"))]


def _list_folders(tree: Path, group: str) -> list[Path]:
    """Return the folders of a group and of those above it. A container may see the name that its group has on
    the host: what follows the part that its tree does not have is the group."""
    parts = group.strip("/").split("/")
    if parts[0] == "..":  # it is not below the groups that this process may see
        return []
    paths = (Path(*parts[start:]) for start in range(len(parts) + 1))
    path = next((path for path in paths if (tree / path).is_dir()), None)
    return [] if path is None else [tree / below for below in (path, *path.parents)]


def cpu_quota(root: str = "/") -> float:
    """Return the cores that the groups allow, such as 0.5; infinity without a limit."""
    quota = math.inf
    for folder in find_folders("cpu", root):
        # version 2 has the quota and its period in one file, version 1 in two
        names = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(read_text(folder / name) for name in names).split()
        with contextlib.suppress(ValueError):  # no such file, or "max": no limit
            time, period = map(int, words)  # microseconds
            if time > 0 and period > 0:  # version 1 writes -1 for no limit
                quota = min(quota, time / period)
    return quota


def allowed_cpus(root: str = "/") -> set[int] | None:
    """Return the numbers of the CPUs that the groups allow; None if they name none."""
    allowed: set[int] | None = None
    for folder in find_folders("cpuset", root):
        # the names of version 2, of version 1 with the groups above, and of the group alone
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            cpus = _parse_cpus(read_text(folder / name))
            if cpus:  # a group obeys those above it: only the CPUs that all of them allow
                allowed = cpus if allowed is None else allowed & cpus
    return allowed


def _parse_cpus(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8"; none for an empty text."""
    spans = [part.split("-") for part in text.split(",") if text.strip()]
    return {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}


def process_limits(root: str = "/") -> list[ProcessLimit]:
    """Return the limits of processes and threads of the groups, that of this process's own group first."""
    limits = []
    for folder in find_folders("pids", root):
        most = read_number(folder / "pids.max")
        if most is not None:
            used = read_number(folder / "pids.current") or 0
            limits.append(ProcessLimit(most, used, f"pids.max of {folder}"))
    return limits


def read_number(path: Path) -> int | None:
    """Return the number in a file; None if there is no such file, or it has another text, such as "max"."""
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None


def read_text(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
