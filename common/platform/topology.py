"""Find the rank of this process and the layout of the job from the launcher, the arguments or the platform.

This module imports no torch.
"""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass

from common.ground.exits import BadInput
from common.platform import platforms
from common.platform.platforms import STARTED_BY, Claim, whole

# Variables with the number of GPUs that a platform promises. PET_NPROC_PER_NODE is not one of them: on a node
# without GPUs, Kubeflow sets it to the number of CPUs.
_PROMISES = (
    "MA_NUM_GPUS", "MLP_WORKER_GPU", "SM_NUM_GPUS", "SKYPILOT_NUM_GPUS_PER_NODE", "DSTACK_GPUS_PER_NODE",
    "NPROC_PER_NODE",
)  # fmt: skip

_MOST_PROCESSES = 100_000
_MOST_PER_NODE = 1024
Address = tuple[str | None, int | None]  # host and port


@dataclass(frozen=True)
class Topology:
    """The layout of the job, and the place of this process in it.

    node_rank, nodes: the index of this node, and the number of nodes.
    processes_per_node: the same on every node.
    local_rank: the index of this process on its node; None if it has to start the node's processes.
    master_host, master_port: the address of the first node; None on a single node without one.
    level: "process" if the platform started one process per rank, "node" if it started one per node.
    source: where the layout comes from. "environment-assumed-node" is a guess that --rank_level can change.
    ignored: arguments that were given and not used, separated by commas.
    """

    node_rank: int
    nodes: int
    processes_per_node: int
    local_rank: int | None
    master_host: str | None
    master_port: int | None
    level: str
    source: str
    ignored: str = ""

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def starts_processes(self) -> bool:
        """Return whether this process is the only one on its node and has to start the others."""
        return self.local_rank is None and self.processes_per_node > 1

    @property
    def rank(self) -> int:
        """Return the global rank; before a node has started its processes, the rank of the first one."""
        return self.node_rank * self.processes_per_node + (self.local_rank or 0)

    def __str__(self) -> str:
        host = f"[{self.master_host}]" if ":" in (self.master_host or "") else self.master_host
        return (
            f"topology source={self.source} level={self.level} nodes={self.nodes} "
            f"processes_per_node={self.processes_per_node} node_rank={self.node_rank} "
            f"master={f'{host}:{self.master_port}' if host else 'none'}"
        ) + (f" ignored={self.ignored}" if self.ignored else "")


def resolve(args: argparse.Namespace, env: Mapping[str, str], gpus: int = 0) -> Topology:
    """Return the topology that _resolve() finds. Raises BadInput, also for too many processes.

    gpus: the processes of a node, if it is not 0 and the job has processes_per_node without a value.
    """
    if gpus and is_distributed(args) and args.processes_per_node is None:
        args = argparse.Namespace(**vars(args) | {"processes_per_node": gpus})
    topology = _resolve(args, env)
    if whole(env, "LOCAL_WORLD_SIZE", 1) < 1:
        raise BadInput(f"LOCAL_WORLD_SIZE={env['LOCAL_WORLD_SIZE']} is not at least 1")
    if topology.processes_per_node > _MOST_PER_NODE or topology.world_size > _MOST_PROCESSES:
        raise BadInput(
            f"{topology.nodes} nodes x {topology.processes_per_node} processes are too many: at most "
            f"{_MOST_PER_NODE} on a node and {_MOST_PROCESSES} in all"
        )
    return topology


def _resolve(args: argparse.Namespace, env: Mapping[str, str]) -> Topology:
    """Return the topology from the first of these sources that is present:

    1. A launcher of processes, which sets LOCAL_RANK: torchrun, torch.distributed.launch, Azure ML, or a job
       that started its own processes. Arguments are ignored, and listed in Topology.ignored: with torchrun a
       tcp:// address would make every rank a client of a store without a server.
    2. Arguments: --init_method, --rank, --world_size. They count nodes, as on ModelArts; with --rank_level
       process they count processes. Missing values are taken from 3 or 4.
    3. The environment of a platform, the most specific first: ModelArts, Volcengine, SageMaker, SkyPilot,
       dstack, Slurm, Kubeflow, Volcano, PAI-DLC or Baidu.
    4. RANK and WORLD_SIZE without a variable that tells what they count. They are assumed to count nodes,
       which is correct if a node has one GPU; --rank_level changes it.
    5. Otherwise: one node.

    args: a missing one counts as None.
        init_method: "tcp://host:port", "host:port", or "env://" for MASTER_ADDR and MASTER_PORT.
        rank, world_size: see 2.
        processes_per_node: the processes that a node starts. None: the number of the platform, else 1. A job
            without this argument starts none.
        rank_level: "node", "process" or None.
    Raises BadInput with the values, also if 2 contradicts 3 or 4.
    """
    level = getattr(args, "rank_level", None)
    if "LOCAL_RANK" in env or "TORCHELASTIC_RUN_ID" in env:
        return _from_launcher(args, env, level)
    claim, address = platforms.detect(env), _address(args)
    rank, size = getattr(args, "rank", None), getattr(args, "world_size", None)
    given = rank is not None or size is not None
    if claim is None and not given:
        host, port = address or (None, None)
        source = "modelarts-arguments" if address else "plain"
        return Topology(0, 1, _processes(args, None), None, host, port, "node", source)
    host, port = address or ((claim.host, claim.port) if claim else platforms.find_master(env, []))
    unit = level or (claim.level if claim and not given else None) or "node"  # what the ranks count
    claimed = _count(claim, unit) if claim else None
    if claim and not claimed and not given:
        raise BadInput(
            f"--rank_level process contradicts {claim.source}, where {claim.said_nodes} counts nodes: a "
            "script that starts processes of its own must set LOCAL_RANK"
        )
    rank, size = _complete(rank, size, claim, claimed, level)
    if size > 1 and not host:
        said = claim.said_nodes if claim and not given else f"--world_size {size}"
        raise BadInput(
            f"{said}, but no variable names the first node: set MASTER_ADDR and MASTER_PORT, or pass "
            "--init_method tcp://host:port"
        )
    if unit == "process":
        return _place_process(args, rank, size, claim, (host, port), given)
    if claim and claim.started > 1:
        raise BadInput(
            f"ranks count nodes, but {claim.source} started {claim.started} processes on each "
            f"({claim.said_rank}): use --rank_level process"
        )
    source = "modelarts-arguments"
    if claim and not given:
        source = claim.source if claim.level or level else f"{claim.source}-assumed-node"
    return Topology(rank, size, _processes(args, claim), None, host, port, "node", source)


def promised_gpus(env: Mapping[str, str]) -> int | None:
    """Return the number of GPUs of this node in the platform's variables; None if it is not set or 0."""
    return next(filter(None, (platforms.count_in(env, name) for name in _PROMISES)), None)


def _from_launcher(args: argparse.Namespace, env: Mapping[str, str], level: str | None) -> Topology:
    own = STARTED_BY in env  # the parent process has applied the arguments already
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT"):
        if name not in env:
            other = "LOCAL_RANK" if "LOCAL_RANK" in env else "TORCHELASTIC_RUN_ID"
            raise BadInput(f"{other} is set, but {name} is not: start the job with torchrun")
    if level == "node" and not own:
        raise BadInput(
            f"--rank_level node contradicts LOCAL_RANK={env['LOCAL_RANK']}: a launcher started one process "
            "per rank"
        )
    rank, local_rank, size = (whole(env, name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    count = _local_world_size(args, env, rank - local_rank, size)
    # Under torchrun two nodes with different numbers of processes can each look consistent.
    elastic = "TORCHELASTIC_RUN_ID" in env
    node_name = "GROUP_RANK" if elastic else "NODE_RANK"
    nodes_name = "GROUP_WORLD_SIZE" if elastic else "AZUREML_NODE_COUNT"
    node_rank, nodes = (rank // count, size // count) if count > 0 else (0, 0)
    consistent = (
        count > 0
        and 0 <= rank < size
        and size % count == 0
        and rank % count == local_rank
        and (own or whole(env, node_name, node_rank) == node_rank)
        and (own or whole(env, nodes_name, nodes) == nodes)
    )
    if not consistent:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", node_name, nodes_name)
        values = " ".join(f"{name}={env[name]}" for name in names if name in env)
        raise BadInput(
            f"{values} contradict each other, with {count} processes per node: every node must run the same "
            "number of processes, and a rank be less than its world size"
        )
    source = "torchrun" if elastic else "azureml" if "NODE_RANK" in env and not own else "launcher"
    given = {name: getattr(args, name, None) for name in ("init_method", "rank", "world_size")}
    ignored = [f"--{name}" for name, value in given.items() if value is not None and value != "env://"]
    return Topology(
        node_rank=node_rank,
        nodes=nodes,
        processes_per_node=count,
        local_rank=local_rank,
        master_host=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=platforms.port(env, "MASTER_PORT"),
        level="process",
        source=source,
        ignored="" if own else ",".join(ignored),
    )


def _local_world_size(args: argparse.Namespace, env: Mapping[str, str], first_rank: int, size: int) -> int:
    """Return the number of processes per node. Azure ML sets no LOCAL_WORLD_SIZE: the number follows from the
    number of nodes or from the first rank of this node; on the first node it is --processes_per_node."""
    if "LOCAL_WORLD_SIZE" in env:
        return whole(env, "LOCAL_WORLD_SIZE")
    if nodes := whole(env, "AZUREML_NODE_COUNT", 0):
        return size // nodes
    if node_rank := whole(env, "NODE_RANK", 0):
        return first_rank // node_rank
    return min(_processes(args, None), max(size, 1))


def _count(claim: Claim, level: str) -> tuple[int, int] | None:
    """Return (rank, size) of a claim as the level counts them; None if they are not known."""
    if level == "node" or claim.level is None:
        return claim.node_rank, claim.nodes
    if claim.local_rank is None:
        return None
    return claim.node_rank * claim.started + claim.local_rank, claim.nodes * claim.started


def _complete(
    rank: int | None,
    size: int | None,
    claim: Claim | None,
    claimed: tuple[int, int] | None,
    level: str | None,
) -> tuple[int, int]:
    """Return --rank and --world_size. One that is missing (None) is that of the claim, or of one node. Raises
    BadInput if they contradict each other or the claim."""
    if size is None:
        if not claimed and rank != 0:
            raise BadInput(f"--rank {rank} without --world_size")
        size = claimed[1] if claimed else 1
    if size < 1:
        raise BadInput(f"--world_size {size} is not at least 1")
    if rank is None:
        if not claimed and size > 1:
            raise BadInput(f"--world_size {size} without --rank")
        rank = claimed[0] if claimed else 0
    if not 0 <= rank < size:
        counted = "processes" if level == "process" else "nodes"
        raise BadInput(f"--rank {rank} is not in 0..{size - 1}: --world_size {size} counts {counted}")
    if claim and claimed and size != claimed[1]:
        hint = "" if level else " (--world_size counts nodes unless --rank_level process is given)"
        raise BadInput(f"--world_size {size} contradicts {claim.said_nodes}{hint}")
    if claim and claimed and rank != claimed[0]:
        raise BadInput(f"--rank {rank} contradicts {claim.said_rank}")
    return rank, size


def _place_process(
    args: argparse.Namespace, rank: int, size: int, claim: Claim | None, master: Address, given: bool
) -> Topology:
    """Return the topology if ranks count processes and LOCAL_RANK is not set. The ranks of a node are
    consecutive. given: whether rank and size are arguments."""
    rank_name, size_name = ("--rank", "--world_size") if given else ("RANK", "WORLD_SIZE")
    if claim and claim.level:
        said, count = claim.said_nodes, size // claim.nodes
        divides = count * claim.nodes == size
    else:  # the number of nodes is not known
        count = min(_processes(args, None), size)
        said, divides = f"--processes_per_node {count}", size % count == 0
    if not divides:
        raise BadInput(f"{size_name} {size} counts processes and is not divisible by {said}")
    node_rank, local_rank = divmod(rank, count)
    if claim and claim.level and node_rank != claim.node_rank:
        raise BadInput(
            f"{rank_name} {rank} is a process of node {node_rank} ({count} on each), but {claim.said_rank}"
        )
    source = claim.source if claim and not given else "arguments"
    return Topology(node_rank, size // count, count, local_rank, *master, "process", source)


def is_distributed(args: argparse.Namespace) -> bool:
    """Return whether the job can have several processes: it has the argument processes_per_node."""
    return hasattr(args, "processes_per_node")


def _processes(args: argparse.Namespace, claim: Claim | None) -> int:
    """Return the number of processes that a node starts."""
    if not is_distributed(args):
        return 1
    return args.processes_per_node or (claim and claim.processes) or 1


def _address(args: argparse.Namespace) -> tuple[str, int] | None:
    """Parse --init_method: "tcp://host:port" or "host:port", an IPv6 address in brackets. None if it is
    missing or env://."""
    init_method = getattr(args, "init_method", None)
    if init_method in (None, "", "env://"):
        return None
    match = re.fullmatch(r"(?:tcp://)?(\[[^\[\]]+\]|[^\[\]:/]+):(\d+)", init_method, re.ASCII)
    if not match or len(match[2]) > 5 or not 0 < int(match[2]) < 65536:
        raise BadInput(f"--init_method {init_method} is not tcp://host:port with a port in 1..65535")
    return match[1].strip("[]"), int(match[2])
