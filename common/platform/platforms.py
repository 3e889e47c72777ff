"""Read the nodes of a job from a platform's environment, by the table of platforms, the most specific first.

It takes the variables, and gives the place of this process as a Claim, or one BadInput with the variables
that are missing or contradict each other. Outside are launchers that the table does not name: refuse() ends
a job that is one of their several processes. Several platforms use the names RANK and WORLD_SIZE with
different meanings. The other variables of the platform decide; if there are none, they count nodes.

This module imports no torch.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained
from bootfile.ground.numbers import count_in, parse_number
from common.platform.signs import LAUNCHERS, RANK, SAGEMAKER_CONFIG, SIZES
from common.platform.table import MPI, PLAIN, PROFILES, STARTS, Platform

# torch's default, used if the platform gives a host but no port, and MASTER_PORT is not set.
_PORT = 29500
_STEPS = 61  # between the ports of two steps of a Slurm job: the ids of jobs that share a node are closer


@dataclass(frozen=True)
class Claim:
    """The place of this process in the job, as one platform gives it.

    source: the name of the platform.
    node_rank, nodes: the index of this node, and the number of nodes.
    said: the variables with their values, for messages.
    host, port: the address of the first node.
    processes: the number per node, None if it is not given. If local_rank is set, the platform has started
        them; otherwise the node must start them.
    local_rank: the index of this process on its node, if the platform started one per rank.
    """

    source: str
    node_rank: int
    nodes: int
    said: str
    host: str | None
    port: int | None
    processes: int | None = None
    local_rank: int | None = None

    @property
    def place(self) -> tuple[int, int] | None:
        """Return (rank, world size) of this process; None if the node must start the processes."""
        if self.local_rank is None or self.processes is None:
            return None
        return self.node_rank * self.processes + self.local_rank, self.nodes * self.processes


def detect(env: Mapping[str, str]) -> Claim | None:
    """Return the claim of the first platform that is recognised, or None. LOCAL_RANK is not read. Raises
    BadInput if values are missing, are not numbers, or contradict each other."""
    for read in _READERS:
        claim = read(env)
        if claim:  # the first platform counts: the others only set some of the same names
            if not 0 <= claim.node_rank < claim.nodes:
                raise BadInput(f"{claim.said}: rank {claim.node_rank} is not in 0..{claim.nodes - 1}")
            return claim
    return None


def of_launcher(env: Mapping[str, str]) -> Claim | None:
    """Return the claim of MPI or Slurm; None if it did not start this process, or contradicts itself."""
    with contextlib.suppress(BadInput):  # torchrun inside of a job has no use for the launcher's numbers
        return _mpi(env) or (None if is_batch(env) else _slurm(env))
    return None


def recognised(env: Mapping[str, str]) -> bool:
    """Return whether a platform set these variables. RANK and WORLD_SIZE alone do not count: a user or
    torchrun may set them. Azure ML has no claim: it starts one process for each rank, as torchrun does. Its
    own variable tells."""
    try:
        claim = detect(env)
    except BadInput:  # its variables contradict each other
        return True
    return (claim is not None and claim.source != PLAIN.source) or "AZUREML_NODE_COUNT" in env


def default_grace(env: Mapping[str, str]) -> float:
    """Return the default of --grace on the platform that set these variables."""
    claim = None
    with contextlib.suppress(BadInput):  # a job reports it when it looks for its place
        claim = detect(env)
    return PROFILES.get(claim.source if claim else "", PLAIN).grace


def has_local_rank_0(env: Mapping[str, str]) -> bool:
    """Return whether a process with these variables prints for its node."""
    of_mpi = [names.split()[2] for names in MPI.values()]
    name = _first(env, "LOCAL_RANK", *of_mpi, "SLURM_LOCALID", "ASCEND_DEVICE_ID")
    return not name or env[name] == "0"


def count_restarts(env: Mapping[str, str]) -> int:
    """Return how often Slurm, torchrun or ModelArts has restarted this job."""
    return max((count_in(env, name) or first) - first for name, first in STARTS.items())


def describe_starts(env: Mapping[str, str]) -> str:
    """Return the counters of starts that the platform has set, as NAME=VALUE; "" without one."""
    return " ".join(f"{name}={env[name]}" for name in STARTS if name in env)


def promised_gpus(env: Mapping[str, str]) -> int | None:
    """Return the number of GPUs of this node in the platform's variables; None if it is not set or 0, which
    some platforms set on a node without GPUs. PET_NPROC_PER_NODE does not count: without GPUs, Kubeflow sets
    it to the number of CPUs. NPROC_PER_NODE counts only on its platforms: scripts of users have this name,
    too."""
    profiles = [profile for profile in PROFILES.values() if not profile.marks or profile.is_marked(env)]
    names = [name for profile in profiles for name in profile.names("{gpus}", "{devices}")]
    return next(filter(None, (count_in(env, name) for name in names)), None)


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
    """Return the first name in a Slurm host list: "node[001-002,7],gpu3" -> node001. Raises BadInput. It does
    the same as `scontrol show hostnames`, which is missing in most containers."""
    # the commas inside of brackets belong to one name
    match = re.match(r"(?:[^,\[\]\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+(?=,|$)", text, re.ASCII)
    if not match:
        raise BadInput(f"{text!r} is not a Slurm host list")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def _read(platform: Platform, env: Mapping[str, str]) -> Claim | None:
    """Return the claim of a platform from its rows of the table, or None if it is another one. Raises
    BadInput."""
    if not platform.is_marked(env):
        return None
    size_names = platform.names("{nodes}")
    rank_names = platform.names("{node}")
    sizes = _numbers(env, size_names)
    hosts: list[str] = []
    for name in platform.names("{hosts}", "{host_lines}"):
        hosts = re.findall(r"[^\s,]+", env.get(name, ""))
        if hosts:
            sizes.append((f"{name}={','.join(hosts)} ({len(hosts)} hosts)", len(hosts)))
    ranks = _numbers(env, rank_names)
    if sizes and sizes[0][1] < 2:
        # an index may be that of another task: of a group of pods, or of a job of its own
        ranks = _numbers(env, [name for name in rank_names if not name.endswith("_INDEX")])
        ranks = ranks or [(f"{rank_names[0]} (one node)", 0)]
    for name, values in ((size_names[0], sizes), (rank_names[0], ranks)):
        if not values:
            texts = [text for text, _ in sizes + ranks]
            raise BadInput(f"{' '.join(texts) or platform.source}, but {name} is not set")
        first_text, first_value = values[0]
        for text, value in values:
            if value != first_value:
                raise BadInput(f"{first_text} contradicts {text}")
    # a variable may name the first node, which need not be the first of the list of hosts
    masters = [env[name] for name in platform.names("{master}") if env.get(name)]
    host = [*masters, *hosts, env.get("MASTER_ADDR")][0]
    port_name = [*platform.names("{port}"), "MASTER_PORT"][0]
    address = find_master(env, host, _PORT, port_name)
    counts = [count_in(env, name) for name in platform.names("{processes}", "{devices}")]
    said = f"{sizes[0][0]} {ranks[0][0]}"
    return Claim(platform.source, ranks[0][1], sizes[0][1], said, *address, *counts)


def _sagemaker(env: Mapping[str, str]) -> Claim | None:
    """Return the claim of SageMaker. A node's rank is the index of its name in a list, which is the same on
    every node. The start scripts of the SDKs set variables from a file of the service; an image without them
    has the file only."""
    file = Path(env.get("SM_INPUT_CONFIG_DIR", SAGEMAKER_CONFIG), "resourceconfig.json")
    if "SM_HOSTS" in env:
        said = f"SM_HOSTS={env['SM_HOSTS']} SM_CURRENT_HOST={env.get('SM_CURRENT_HOST')}"
    elif os.path.isfile(file):  # False, too, if a folder above cannot be searched
        said = str(file)
    else:
        return None
    failure = f"{said}: expected a JSON list of host names with that of this host"
    with explained(failure, ValueError, TypeError, LookupError, RecursionError):
        if "SM_HOSTS" in env:
            hosts = [*map(str, json.loads(env["SM_HOSTS"]))]
            rank = hosts.index(env["SM_CURRENT_HOST"])
        else:
            config = json.loads(file.read_text(encoding="utf-8"))
            hosts = sorted(map(str, config["hosts"]))  # as the SDK's scripts do
            rank = hosts.index(config["current_host"])
    return Claim("sagemaker", rank, len(hosts), said, *find_master(env, hosts[0]))


def _mpi(env: Mapping[str, str]) -> Claim | None:
    """Return the claim of a launcher of MPI. A single process counts as one that was started without it. It
    may run inside a job of Slurm or of a platform, whose variables then describe the launcher. If a node has
    one process, this process starts the others, as for Slurm."""
    for source, row in MPI.items():
        names = row.split()
        # one process: the launcher's variables may be those of a job around this one
        if not env.keys() >= set(names) or whole(env, names[1]) == 1:
            continue
        rank = whole(env, names[0])
        size = whole(env, names[1])
        local_rank = whole(env, names[2])
        count = whole(env, names[3])
        if names[3].endswith("NNODES"):  # it gives the nodes, not the processes of a node
            count = size // max(1, count)
        said = values_of(env, *names)
        # a claim has the node and the local rank only: another placement could give two processes one rank
        if not 0 <= local_rank < count or size % count or rank % count != local_rank:
            raise BadInput(
                f"{said} do not fit: every node must run the same number of processes, with ranks in a row: "
                "mpirun --map-by ppr:N:node, mpiexec -ppn N"
            )
        if count == size:  # all are on this node, and other jobs may be, too
            address = find_master(env, env.get("MASTER_ADDR") or "127.0.0.1", _own_port(_launcher_pid()))
        else:  # in a job of SageMaker, or of Azure ML, which gives host:port
            platform = _sagemaker(env)
            host_of_azure, _, _ = env.get("AZ_BATCH_MASTER_NODE", "").partition(":")
            host_of_platform = platform.host if platform else host_of_azure
            address = find_master(env, env.get("MASTER_ADDR") or host_of_platform)
        if count == 1:  # it starts the others of its node itself
            return Claim(source, rank, size, said, *address)
        return Claim(source, rank // count, size // count, said, *address, count, local_rank)
    return None


def _launcher_pid() -> int:
    """Return the process id of the launcher, which all processes of one mpirun on this node share. Each of
    them chooses its port by it: with another number they would not meet. The parent of this process may be a
    shell script that the launcher has started. A launcher gives each of its children a process group, and the
    child leads it. So the launcher is the parent of the leader."""
    leader = os.getpgrp()
    # /proc/PID/stat: "PID (name) state parent ..."; the name may have spaces and brackets
    with contextlib.suppress(OSError, ValueError, IndexError):  # the leader has ended, or there is no /proc
        status = Path(f"/proc/{leader}/stat").read_text()
        _, _, fields = status.rpartition(")")
        _, parent, *_ = fields.split()
        return int(parent)
    return os.getppid()


def _own_port(number: int) -> int:
    """Return a port for a job with this number. Jobs that share a node need different ports: above Linux's
    ephemeral ports, which end at 60999."""
    return 61440 + number % 4096


def is_batch(env: Mapping[str, str]) -> bool:
    """Return whether this is the batch script of a Slurm job, and not a task of srun."""
    return env.get("SLURM_PROCID") == "0" and not any(name.startswith("SLURM_STEP") for name in env)


def _rank_table(env: Mapping[str, str]) -> Claim | None:
    """Return the claim of an Ascend node, where the platform starts one process per NPU. The table is that of
    HCCL, version 1.0, in JSON."""
    if not env.keys() >= {"RANK_TABLE_FILE", "RANK_ID", "RANK_SIZE"}:
        return None
    said = values_of(env, "RANK_TABLE_FILE", "RANK_ID", "RANK_SIZE")
    rank = whole(env, "RANK_ID")
    size = whole(env, "RANK_SIZE")
    # the platform writes the file before it starts the processes
    failure = f"{said}: it is not a rank table with servers and their devices"
    with explained(failure, ValueError, LookupError, TypeError, RecursionError):
        table = json.loads(Path(env["RANK_TABLE_FILE"]).read_text(encoding="utf-8"))
        servers = table["server_list"]
        counts = [len(server["device"]) for server in servers]
        first = str(servers[0]["server_id"])
    count = counts[0]
    if {*counts} != {count} or size != sum(counts):
        raise BadInput(f"{said}: expected the same number of NPUs on every server, {size} in all")
    first = env.get("VC_WORKER_HOSTS", "").split(",")[0] or first  # the containers' names, on ModelArts
    address = find_master(env, env.get("MASTER_ADDR") or first)
    return Claim("rank-table", rank // count, len(servers), said, *address, count, rank % count)


def _slurm(env: Mapping[str, str]) -> Claim | None:
    """Return the claim of Slurm. srun starts one process per task. A job step may have fewer nodes than the
    job, so the STEP variables are preferred. If a node with several GPUs has one task, this task starts the
    others; otherwise all GPUs but one would be idle."""
    tasks_name = _first(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if "SLURM_PROCID" not in env or not tasks_name:  # salloc, or a batch script that starts no tasks
        return None
    nodes_name = _first(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or "SLURM_NNODES"
    layout_name = _first(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or ""
    names = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", tasks_name, nodes_name)
    rank = whole(env, "SLURM_PROCID")
    node_rank = whole(env, "SLURM_NODEID")
    local_rank = whole(env, "SLURM_LOCALID")
    tasks = whole(env, tasks_name)
    nodes = whole(env, nodes_name)
    said = values_of(env, *names, layout_name)
    count = tasks // max(1, nodes)
    # the loaders give rank r the samples of place r, so ranks must be placed node by node
    in_a_row = 0 <= local_rank < count and rank == node_rank * count + local_rank
    sizes = set(re.findall(r"(?:^|,)(\d+)", env.get(layout_name, "")))
    if tasks != nodes * count or not in_a_row or len(sizes) > 1:
        raise BadInput(
            f"{said} do not fit: every node must run the same number of processes, with ranks in a row: "
            "srun --ntasks-per-node=N --distribution=block"
        )
    host = env.get("MASTER_ADDR")
    list_name = _first(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    if list_name and not host:
        host = first_host(env[list_name])
    # jobs of several users may share the node, and steps of one job, each with its own port
    number = whole(env, "SLURM_JOB_ID", 0) + _STEPS * whole(env, "SLURM_STEP_ID", 0)
    address = find_master(env, host, _own_port(number))
    if count == 1 and (count_in(env, "SLURM_GPUS_ON_NODE") or 0) > 1:  # this task starts the others
        return Claim("slurm", node_rank, nodes, said, *address)
    return Claim("slurm", node_rank, nodes, said, *address, count, local_rank)


def _volcano(env: Mapping[str, str]) -> Claim | None:
    """Return the claim of Volcano. The pytorch plugin numbers all pods by RANK. Without it, VC_TASK_INDEX
    counts the pods of one task only."""
    # Volcano sets a list of hosts for each task, which is a group of pods of the job
    lists = sorted(name for name in env if re.fullmatch(r"VC_\w+_HOSTS", name) and env[name].strip())
    if lists and "WORLD_SIZE" in env:
        return _read(replace(PLAIN, source="volcano"), env)
    if len(lists) > 1:
        raise BadInput(
            f"{' and '.join(lists)} are {len(lists)} groups of pods, and RANK and WORLD_SIZE do not "
            "put them in one order: use Volcano's pytorch plugin"
        )
    if lists:
        [name] = lists
        rows = {name.removesuffix("_HOSTS") + "_NUM": "{nodes}", name: "{hosts}"}
        rows |= dict.fromkeys(("VC_TASK_INDEX", "VK_TASK_INDEX"), "{node}")
        return _read(Platform(rows, source="volcano", marks=(name,)), env)
    return None


def _of(name: str) -> Callable[[Mapping[str, str]], Claim | None]:
    """Return the reader of a platform of the table."""
    return partial(_read, PROFILES[name])


_READERS = (
    _mpi,  # started inside a job of a platform
    _rank_table,  # on ModelArts, so before it
    _of("modelarts-custom"), _of("volcengine"), _sagemaker, _of("skypilot"), _of("dstack"), _slurm,
    _of("kubeflow"), _of("kubernetes"), _of("kubeflow-v2"), _volcano, _of("pai-dlc"), partial(_read, PLAIN),
)  # fmt: skip


def find_master(
    env: Mapping[str, str], host: str | None, default_port: int = _PORT, port_name: str = "MASTER_PORT"
) -> tuple[str | None, int | None]:
    """Return (host, port) of the master, or (None, None) if no variable names a host."""
    if not host:
        return None, None
    # the port of the platform, then MASTER_PORT, then the default
    name = port_name if port_name in env else "MASTER_PORT"
    return host, port(env, name, default_port)


def _numbers(env: Mapping[str, str], names: Sequence[str]) -> list[tuple[str, int]]:
    """Return ("NAME=VALUE", number) of the variables that are set. Raises BadInput."""
    return [(f"{name}={env[name]}", whole(env, name)) for name in names if name in env]


def values_of(env: Mapping[str, str], *names: str) -> str:
    """Return the variables that are set, with their values, as a message shows them."""
    return " ".join(f"{name}={env[name]}" for name in names if name in env)


def _first(env: Mapping[str, str], *names: str) -> str | None:
    """Return the first of these variables that is set; None without one."""
    return next((name for name in names if name in env), None)


# What follows is for launchers that the table does not name.
# ranks that a process manager sets for each process; only its library knows their number
_OF_MANAGERS = ("PMIX_RANK", "PMI_RANK")


def refuse(env: Mapping[str, str], claim: Claim | None) -> None:
    """Raise BadInput if this is one of several processes, and the claim does not describe them. Otherwise
    each of them would train alone, and they would write into one folder."""
    if is_batch(env) and (claim is None or claim.source == "slurm"):
        nodes = count_in(env, "SLURM_NNODES") or 1
        tasks = count_in(env, "SLURM_NTASKS") or nodes * (count_in(env, "SLURM_NTASKS_PER_NODE") or 1)
        if tasks > 1:
            said = values_of(env, "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NNODES", "SLURM_NTASKS")
            raise BadInput(
                f"{said}: a batch script runs once, not as {tasks} tasks: write srun --kill-on-bad-exit=1 "
                "python jobs/... (guides/slurm.md); srun --ntasks=1 starts one process"
            )
    if claim and claim.nodes * (claim.processes or 1) > 1:  # it says how the processes belong together
        return
    if names := _find_signs(env, claim):
        shown = values_of(env, *sorted(names))
        raise BadInput(
            f"{shown}: this is one of several processes, and their number, nodes or "
            "local ranks are not known: use torchrun, or set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT; for a job of its own: env -u NAME ... python"
        )


def _find_signs(env: Mapping[str, str], claim: Claim | None) -> set[str]:
    """Return the names of the variables that show that this is one of several processes: a size above 1 of a
    launcher, a rank with such a size, a rank above 0 of a launcher that gives no size, and any rank of a
    process manager if no launcher gives a size (PMIX_RANK=0)."""
    size_names = [row.split()[1] for row in MPI.values()]
    signs = {name for name in size_names if _is_above(env, name, 1)}
    for name in env:
        match = RANK.fullmatch(name)
        is_known = claim is not None and name.startswith("SLURM_")
        if not match or is_known or not env[name].strip().isdigit():
            continue
        # a job of one process may have a rank, too, so only a rank with a size above 1 counts
        sizes = {match[1] + end for end in SIZES if _is_above(env, match[1] + end, 1)}
        if sizes:
            signs |= {name, *sizes}
        elif _is_above(env, name, 0) and LAUNCHERS.match(name):
            signs.add(name)
    # a rank of 0 without any size: the others are refused, and this one would train alone
    if claim is None and not signs and not any(name in env for name in size_names):
        signs.update(name for name in _OF_MANAGERS if env.get(name, "").strip().isdigit())
    if "," in env.get("TPU_WORKER_HOSTNAMES", ""):
        signs.add("TPU_WORKER_HOSTNAMES")
    for name in ("TF_CONFIG", "CLUSTER_SPEC"):
        # JSON: {"cluster": {"worker": [HOST, ...], ...}}; another form does not count
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            cluster = json.loads(env[name])["cluster"]
            if sum(map(len, cluster.values())) > 1:
                signs.add(name)
    return signs


def _is_above(env: Mapping[str, str], name: str, number: int) -> bool:
    """Return whether a variable has a number above this one."""
    return (count_in(env, name) or 0) > number
