"""Read the limits that the control groups of this process set: cores, processes and threads.

A group may be far below the root: Slurm, systemd-run and Kubernetes make one for each job. /proc/self/cgroup
names the groups of this process, and /proc/self/mountinfo says where they are mounted. Each group also obeys
the limits of the groups above it, so the smallest one counts. Version 2 has one tree of groups, version 1 has
one for each controller, and a node may have both.

root: the folder that has proc and sys; another one than / in tests. Without control groups that this process
can see below its own root, nothing is limited. This module imports no torch.

Source: Linux, admin-guide/cgroup-v2.rst and admin-guide/cgroup-v1; cgroups(7); proc_pid_mountinfo(5).
"""

import contextlib
import math
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from bootfile.ground.mounts import unescape

# `ulimit -u` of this number and more is not reached by accident: the processes of a user are not counted then
MANY_PROCESSES = 8192
_CONTROLLERS = ("cpu", "cpuset", "memory", "pids")  # those of version 1 that are read here
_SECOND_VERSION = ""  # its line in /proc/self/cgroup names no controller


class _Mount(NamedTuple):
    """A mounted tree of groups. folder: where. group: the name of the group that is mounted there.
    controllers: of version 1, or only _SECOND_VERSION."""

    folder: Path
    group: PurePosixPath
    controllers: frozenset[str]


class ProcessLimit(NamedTuple):
    """A limit of the number of processes and threads, which count alike. used: those that run now. name: of
    the setting."""

    most: int
    used: int
    name: str


def find_folders(controller: str, root: str = "/") -> list[Path]:
    """Return the folders with the files of the groups that limit this process: its own, then those above it.

    controller: one of _CONTROLLERS. A group above the mount is not visible, as in most containers.
    """
    groups = _read_groups(root)
    folders: list[Path] = []
    # a node may have both versions, as with a controller that version 2 has left to version 1: both limit
    for version in (_SECOND_VERSION, controller):
        mounts = [mount for mount in _find_mounts(root) if version in mount.controllers]
        inside: list[Path] = []
        for mount in mounts:
            inside += _list_folders(mount, groups.get(version))
        # A container may see the name that its group has on the host: no mount has it, and what is mounted is
        # the group itself.
        folders += inside or [mount.folder for mount in mounts]
    return folders


def _list_folders(mount: _Mount, group: PurePosixPath | None) -> list[Path]:
    """Return the folders of a group and of those above it in one mount; [] if the mount has another part of
    the tree."""
    if group is None or not group.is_relative_to(mount.group):
        return []
    path = group.relative_to(mount.group)
    if ".." in path.parts:  # a group outside of the root of this process's namespace
        return []
    return [mount.folder / below for below in (path, *path.parents)]


def _read_groups(root: str) -> dict[str, PurePosixPath]:
    """Return controller -> the group of this process, from lines such as "4:cpu,cpuacct:/slurm/job_7". A root
    without that file has the top groups."""
    names = (_SECOND_VERSION, *_CONTROLLERS)
    text = read_text(Path(root, "proc/self/cgroup"))
    if not text:
        return dict.fromkeys(names, PurePosixPath("/"))
    groups = {}
    for line in text.splitlines():
        _, _, names_and_group = line.partition(":")
        controllers, _, group = names_and_group.partition(":")  # the group's name may have colons, too
        for controller in controllers.split(","):
            groups[controller] = PurePosixPath(group)
    return groups


def _find_mounts(root: str) -> list[_Mount]:
    """Return the mounted trees of groups; the usual ones if /proc/self/mountinfo lists none."""
    mounts = []
    for line in read_text(Path(root, "proc/self/mountinfo")).splitlines():
        # "31 23 0:28 GROUP FOLDER options [optional fields] - TYPE source options of the file system"
        words, _, ending = line.partition(" - ")
        try:
            group, folder = map(unescape, words.split()[3:5])
            kind, _, options = ending.split(maxsplit=2)
        except ValueError:  # a kernel that is not Linux's may write less
            continue
        controllers = frozenset(options.split(","))
        if kind == "cgroup2":
            controllers = frozenset({_SECOND_VERSION})
        elif kind != "cgroup":
            continue
        mounts.append(_Mount(Path(root, folder.lstrip("/")), PurePosixPath(group), controllers))
    # none is listed, or the file cannot be read: then the usual places
    if mounts:
        return mounts
    top = PurePosixPath("/")
    usual = Path(root, "sys/fs/cgroup")
    mounts.append(_Mount(usual, top, frozenset({_SECOND_VERSION})))
    mounts.extend(_Mount(usual / controller, top, frozenset({controller})) for controller in _CONTROLLERS)
    return mounts


def cpu_quota(root: str = "/") -> float:
    """Return the cores that the groups allow, such as 0.5; infinity without a limit."""
    quota = math.inf
    for folder in find_folders("cpu", root):
        # version 2 has the quota and its period in one file, version 1 in two
        words = read_text(folder / "cpu.max").split()
        if not words:
            words = [
                *read_text(folder / "cpu.cfs_quota_us").split(),
                *read_text(folder / "cpu.cfs_period_us").split(),
            ]
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
    """Return the numbers of a list such as "0-3,8", up to the first part that is not a number or a range."""
    cpus = set[int]()
    with contextlib.suppress(ValueError):
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def process_limits(root: str = "/") -> list[ProcessLimit]:
    """Return the limits of processes and threads of the groups, that of this process's own group first."""
    limits = []
    for folder in find_folders("pids", root):
        most = read_number(folder / "pids.max")
        used = read_number(folder / "pids.current")
        if most is not None:
            limits.append(ProcessLimit(most, used or 0, f"pids.max of {folder}"))
    return limits


def read_number(path: Path) -> int | None:
    """Return the number in a file; None if there is no such file, or it has another text, such as "max"."""
    text = read_text(path).strip()
    if text.isascii() and text.isdigit():
        return int(text)
    return None


def read_text(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
