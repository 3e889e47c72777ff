"""Read the nodes of a job from a platform's environment: one function per platform, the most specific first.

This module imports no torch. Several platforms use the names RANK and WORLD_SIZE with different meanings. The
other variables of the platform decide; if none does, the level of the claim is None.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.ground.exits import BadInput

# Options that platforms add to the command line of a job.
INJECTED = frozenset({"init_method", "rank", "world_size", "local_rank", "node_rank", "num_gpus"})

STARTED_BY = "BOOTFILE_STARTED_BY"  # process id of the parent; set by a job that starts its own processes

_AMBIGUOUS = "environment"  # the source of a claim from RANK and WORLD_SIZE only

# torch's default, used if the platform gives a host but no port, and MASTER_PORT is not set.
_PORT = 29500


@dataclass(frozen=True)
class Claim:
    """The place of this process in the job, as one platform gives it.

    source: the name of the platform.
    level: whether the platform starts one process per "node" or per "process" (rank). None if its variables
        do not tell; then node_rank and nodes are the values of RANK and WORLD_SIZE.
    node_rank, nodes: the index of this node, and the number of nodes.
    said_rank, said_nodes: the variables with their values, for messages.
    host, port: the address of the first node.
    processes: the number per node, None if it is not given. If local_rank is set, the platform has started
        them; otherwise the node must start them.
    local_rank: the index of this process on its node, if the platform started one per rank.
    """

    source: str
    level: str | None
    node_rank: int
    nodes: int
    said_rank: str
    said_nodes: str
    host: str | None
    port: int | None
    processes: int | None = None
    local_rank: int | None = None

    @property
    def started(self) -> int:
        """Return the number of processes that the platform started on each node."""
        return 1 if self.local_rank is None else self.processes or 1


def detect(env: Mapping[str, str]) -> Claim | None:
    """Return the claim of the first platform that is recognised, or None. LOCAL_RANK is not read.

    Raises BadInput if values are missing, are not numbers, or contradict each other.
    """
    for platform in _PLATFORMS:
        claim = platform(env)
        if claim:
            if claim.nodes < 1:
                raise BadInput(f"{claim.said_nodes} is not at least 1")
            if not 0 <= claim.node_rank < claim.nodes:
                raise BadInput(f"{claim.said_rank} is not in 0..{claim.nodes - 1}: {claim.said_nodes}")
            return claim
    return None


def recognised(env: Mapping[str, str]) -> bool:
    """Return whether a platform set these variables. RANK and WORLD_SIZE alone do not count: a user or
    torchrun may set them. Azure ML has no claim, because it sets LOCAL_RANK."""
    try:
        claim = detect(env)
    except BadInput:  # its variables contradict each other
        return True
    return (claim is not None and claim.source != _AMBIGUOUS) or "AZUREML_NODE_COUNT" in env


def is_first_on_node() -> bool:
    """Return whether this process prints for its node before the process group exists."""
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    return local_rank == "0" and STARTED_BY not in os.environ


def parse_number(text: str, kind: Callable[[str], Any] = int) -> Any:
    """Return a number of this kind, int or float. Raises ValueError, also for 1_0 and the digits of other
    scripts, which int() and float() accept."""
    return kind(text if text.isascii() and "_" not in text else "")


def count_in(env: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable; None if it is a word, is not above 0, or is not set."""
    with contextlib.suppress(ValueError):
        return max(0, parse_number(env.get(name, ""))) or None
    return None


def whole(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the value of a variable as an integer. Raises BadInput if it is not an integer, or is missing
    without a default."""
    if name not in env and default is not None:
        return default
    try:
        return parse_number(env[name])
    except KeyError:
        raise BadInput(f"{name} is not set") from None
    except ValueError:
        raise BadInput(f"{name}={env[name]} is not a whole number") from None


def port(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the value of a variable as a port in 1..65535. Raises BadInput."""
    number = whole(env, name, default)
    if not 0 < number < 65536:
        raise BadInput(f"{name}={number} is not a port in 1..65535")
    return number


def first_host(text: str) -> str:
    """Return the first name in a Slurm host list: "node[001-002,7],gpu3" -> node001. Raises BadInput.

    It does the same as `scontrol show hostnames`, which is missing in most containers.
    """
    match = re.match(r"(?:[^,\[\]\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+(?=,|$)", text, re.ASCII)
    if not match:
        raise BadInput(f"{text!r} is not a Slurm host list")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def _modelarts(env: Mapping[str, str]) -> Claim | None:
    """Return the claim of ModelArts for a custom image, which gets no arguments. MA_NUM_HOSTS is the number
    of nodes, and the first of VC_WORKER_HOSTS is the master.

    ModelArts runs on Volcano and shares the VC_ names with it. It does not give a port.
    """
    hosts = _split(env.get("VC_WORKER_HOSTS", ""))
    if "MA_NUM_HOSTS" not in env and not (hosts and any(name.startswith("MA_") for name in env)):
        return None
    statements = [_said(env, name) for name in ("MA_NUM_HOSTS", "VC_WORKER_NUM") if name in env]
    if hosts:
        statements.append((f"VC_WORKER_HOSTS={','.join(hosts)} ({len(hosts)} hosts)", len(hosts)))
    said, nodes = _agreed(statements)
    return _one_per_node(env, "modelarts-environment", said, nodes, ["VC_TASK_INDEX"], hosts)


def _volcengine(env: Mapping[str, str]) -> Claim | None:
    if "MLP_WORKER_NUM" not in env:
        return None
    said, nodes = _said(env, "MLP_WORKER_NUM")
    hosts = _split(env.get("MLP_WORKER_0_HOST", ""))
    return _one_per_node(env, "volcengine", said, nodes, ["MLP_ROLE_INDEX"], hosts, "MLP_WORKER_0_PORT")


def _sagemaker(env: Mapping[str, str]) -> Claim | None:
    """Return the claim of SageMaker. A node's rank is the index of its name in a list, which is the same on
    every node."""
    if "SM_HOSTS" not in env:
        return None
    said = f"SM_HOSTS={env['SM_HOSTS']}"
    try:
        hosts = json.loads(env["SM_HOSTS"])
    except (ValueError, RecursionError):
        hosts = None
    if not (isinstance(hosts, list) and hosts and all(isinstance(host, str) for host in hosts)):
        raise BadInput(f"{said} is not a JSON list of host names")
    own = env.get("SM_CURRENT_HOST")
    if own not in hosts:
        raise BadInput(f"SM_CURRENT_HOST={own} is not in {said}")
    said_rank = f"SM_CURRENT_HOST={own}"
    return Claim("sagemaker", "node", hosts.index(own), len(hosts), said_rank, said, *master(env, hosts))


def _skypilot(env: Mapping[str, str]) -> Claim | None:
    if "SKYPILOT_NODE_RANK" not in env:
        return None
    hosts = env.get("SKYPILOT_NODE_IPS", "").split()  # one a line
    addresses = f"SKYPILOT_NODE_IPS={','.join(hosts)} ({len(hosts)} addresses)"
    said, nodes = _agreed([_said(env, "SKYPILOT_NUM_NODES"), (addresses, len(hosts))])
    return _one_per_node(env, "skypilot", said, nodes, ["SKYPILOT_NODE_RANK"], hosts)


def _dstack(env: Mapping[str, str]) -> Claim | None:
    if "DSTACK_NODE_RANK" not in env:
        return None
    said, nodes = _said(env, "DSTACK_NODES_NUM")
    hosts = _split(env.get("DSTACK_MASTER_NODE_IP", ""))
    return _one_per_node(env, "dstack", said, nodes, ["DSTACK_NODE_RANK"], hosts)


def _slurm(env: Mapping[str, str]) -> Claim | None:
    """Return the claim of Slurm. srun starts one process per task. A job step may have fewer nodes than the
    job, so the STEP variables are preferred.

    If a node with several GPUs has one task, the level is "node"; otherwise all GPUs but one would be idle.
    """
    tasks_name = _first(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if "SLURM_PROCID" not in env or not tasks_name:  # salloc, or a batch script that starts no tasks
        return None
    nodes_name = _first(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or "SLURM_NNODES"
    said_tasks, tasks = _said(env, tasks_name)
    said_nodes, nodes = _said(env, nodes_name)
    layout_name = _first(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if layout_name and len(set(re.findall(r"(?:^|,)(\d+)", env[layout_name]))) > 1:
        raise BadInput(
            f"{layout_name}={env[layout_name]}: every node must run the same number of processes; "
            "start the step with --ntasks-per-node"
        )
    if nodes < 1 or tasks % nodes:
        raise BadInput(
            f"{said_tasks} is not divisible by {said_nodes}: every node must run the same number of processes"
        )
    count, gpus = tasks // nodes, count_in(env, "SLURM_GPUS_ON_NODE") or 0
    node_rank, local_rank = whole(env, "SLURM_NODEID"), whole(env, "SLURM_LOCALID")
    said_rank = f"SLURM_PROCID={env['SLURM_PROCID']} SLURM_NODEID={node_rank} SLURM_LOCALID={local_rank}"
    if not 0 <= local_rank < count or whole(env, "SLURM_PROCID") != node_rank * count + local_rank:
        raise BadInput(
            f"{said_rank} do not follow {said_tasks} {said_nodes}: srun --distribution=block gives each node "
            f"{count} ranks in a row"
        )
    list_name = _first(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    hosts = [first_host(env[list_name])] if list_name and not env.get("MASTER_ADDR") else []
    # Jobs that share a node need different ports: above Linux's ephemeral ports, which end at 60999.
    derived = 61440 + whole(env, "SLURM_JOB_ID", 0) % 4096
    level = "node" if count == 1 and gpus > 1 else "process"
    return Claim(
        "slurm", level, node_rank, nodes, said_rank, f"{said_nodes} {said_tasks}",
        *master(env, hosts, derived), count, local_rank,
    )  # fmt: skip


def _kubeflow(env: Mapping[str, str]) -> Claim | None:
    """Return the claim of Kubeflow. PET_* are the options of torchrun. The first operator adds RANK, which
    counts pods, and WORLD_SIZE, which counts pods x processes; the second operator does not set them.

    If PET_NPROC_PER_NODE is "auto", "gpu" or "cpu", WORLD_SIZE also counts pods.
    """
    if "PET_NNODES" not in env:
        return None
    if ":" in env["PET_NNODES"]:
        raise BadInput(f"PET_NNODES={env['PET_NNODES']} is elastic: start the job with torchrun")
    said, nodes = _said(env, "PET_NNODES")
    number, processes = env.get("PET_NPROC_PER_NODE", ""), count_in(env, "PET_NPROC_PER_NODE")
    first = "WORLD_SIZE" in env
    if first and whole(env, "WORLD_SIZE") not in (nodes, nodes * (processes or 1)):
        raise BadInput(f"WORLD_SIZE={env['WORLD_SIZE']} contradicts {said} x PET_NPROC_PER_NODE={number}")
    names = [name for name in ("PET_NODE_RANK", "RANK") if name in env] or ["PET_NODE_RANK"]
    hosts = [env[name] for name in ("PET_MASTER_ADDR", "MASTER_ADDR") if env.get(name)]
    source = "kubeflow" if first else "kubeflow-v2"
    return _one_per_node(env, source, said, nodes, names, hosts, "PET_MASTER_PORT", processes)


def _volcano(env: Mapping[str, str]) -> Claim | None:
    """Return the claim of Volcano. The pytorch plugin numbers all pods by RANK. Without it, VC_TASK_INDEX
    counts the pods of one task only."""
    lists = {name: _split(env[name]) for name in sorted(env) if re.fullmatch(r"VC_\w+_HOSTS", name)}
    if not lists:
        return None
    if "WORLD_SIZE" in env:
        return _counted(env, "volcano", "node")
    if len(lists) > 1:
        raise BadInput(
            f"{' and '.join(lists)} are {len(lists)} groups of pods, and RANK and WORLD_SIZE do not "
            "put them in one order: use Volcano's pytorch plugin"
        )
    ((name, hosts),) = lists.items()
    statements = [(f"{name}={','.join(hosts)} ({len(hosts)} hosts)", len(hosts))]
    number = name.removesuffix("_HOSTS") + "_NUM"
    said, nodes = _agreed([*statements, _said(env, number)] if number in env else statements)
    names = [name for name in ("VC_TASK_INDEX", "VK_TASK_INDEX") if name in env] or ["VC_TASK_INDEX"]
    return _one_per_node(env, "volcano", said, nodes, names, hosts)


def _pai_or_baidu(env: Mapping[str, str]) -> Claim | None:
    """Return the claim of Alibaba PAI-DLC or Baidu AIHC. Both set the same names, which count nodes."""
    if "NPROC_PER_NODE" not in env or not {"RANK", "WORLD_SIZE"} & set(env):
        return None
    return _counted(env, "pai-dlc-or-baidu", "node", count_in(env, "NPROC_PER_NODE"))


def _ambiguous(env: Mapping[str, str]) -> Claim | None:
    """Return a claim from RANK and WORLD_SIZE only: older operators count nodes, a shell script may count
    processes."""
    return _counted(env, _AMBIGUOUS, None) if {"RANK", "WORLD_SIZE"} & set(env) else None


_PLATFORMS = (
    _modelarts, _volcengine, _sagemaker, _skypilot, _dstack, _slurm, _kubeflow, _volcano, _pai_or_baidu,
    _ambiguous,
)  # fmt: skip


def _one_per_node(
    env: Mapping[str, str],
    source: str,
    said: str,
    nodes: int,
    rank_names: Sequence[str],
    hosts: list[str],
    port_name: str = "MASTER_PORT",
    processes: int | None = None,
) -> Claim:
    """Return the claim of a platform that numbers nodes by one variable, or by two that must agree.

    On one node the variables are only checked: on some platforms they hold the index of another task.

    said, nodes: the number of nodes, as text and as a number.
    rank_names: the variables that number the nodes.
    hosts: the master is the first of these, or MASTER_ADDR if the list is empty.
    port_name: the variable of the port.
    processes: the number per node, if it is given.
    """
    said_rank, node_rank = f"{rank_names[0]} (one node)", 0
    for name in rank_names:
        whole(env, name, 0)
    if nodes > 1:
        if rank_names[0] not in env:
            raise BadInput(f"{said}, but {rank_names[0]} is not set")
        said_rank, node_rank = _agreed([_said(env, name) for name in rank_names])
    host, port_number = master(env, hosts, None, port_name)
    return Claim(source, "node", node_rank, nodes, said_rank, said, host, port_number, processes)


def _counted(env: Mapping[str, str], source: str, level: str | None, processes: int | None = None) -> Claim:
    """Return a claim from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in env:
            raise BadInput(f"{other}={env[other]} is set, but {name} is not")
    (said_rank, rank), (said, size) = _said(env, "RANK"), _said(env, "WORLD_SIZE")
    return Claim(source, level, rank, size, said_rank, said, *master(env, []), processes)


def master(
    env: Mapping[str, str], hosts: list[str], derived: int | None = None, port_name: str = "MASTER_PORT"
) -> tuple[str | None, int | None]:
    """Return (host, port) of the master, or (None, None) if no variable names a host."""
    host = hosts[0] if hosts else env.get("MASTER_ADDR")
    name = port_name if port_name in env else "MASTER_PORT"
    return (host, port(env, name, derived or _PORT)) if host else (None, None)


def _agreed(statements: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """Return the first of (text, number). Raises BadInput if the numbers differ."""
    said, number = statements[0]
    for other, value in statements[1:]:
        if value != number:
            raise BadInput(f"{said} contradicts {other}")
    return said, number


def _said(env: Mapping[str, str], name: str) -> tuple[str, int]:
    return f"{name}={env.get(name)}", whole(env, name)


def _first(env: Mapping[str, str], *names: str) -> str | None:
    return next((name for name in names if name in env), None)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


_CGROUPS = "/sys/fs/cgroup"


def available_cores(cgroups: str = _CGROUPS) -> int:
    """Return the number of cores of the CPU affinity, or of the control group's quota if that is less; at
    least 1. A quota is rounded up.

    cgroups: the folder where control groups are mounted. Source: Linux, admin-guide/cgroup-v2.rst (cpu.max)
    and scheduler/sched-bwc.rst (cpu.cfs_quota_us).
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _numbers(cgroups, "cpu.max") or _numbers(cgroups, "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
    if quota and quota[0] > 0 and quota[1] > 0:
        count = min(count, math.ceil(quota[0] / quota[1]))
    return max(1, count)


def _numbers(folder: str, *names: str) -> list[int] | None:
    """Return (quota, period) in microseconds; None without a file or a limit."""
    try:
        words = []
        for name in names:
            with open(os.path.join(folder, name), encoding="ascii") as file:
                words += file.read().split()
        return [int(word) for word in words] if len(words) == 2 else None
    except (OSError, ValueError):  # "max": no limit
        return None
