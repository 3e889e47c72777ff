"""Find the rank of this process and the layout of the job from the launcher, the arguments or the platform.
place.py loads this module only if one of them is there. It imports no torch."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import replace

from bootfile.ground.errors import BadInput
from common.platform import platforms
from common.platform.platforms import Claim, whole
from common.platform.signs import STARTED_BY
from common.platform.topology import Topology, is_distributed


def resolve(args: argparse.Namespace, env: Mapping[str, str], gpus: int = 0) -> Topology:
    """Return the topology from the first of these sources that is present:

    1. A launcher of processes, which sets LOCAL_RANK: torchrun, torch.distributed.launch, Azure ML,
       DeepSpeed, or a job that started its own processes. Arguments are ignored: with torchrun a tcp://
       address would make every rank a client of a store without a server.
    2. Arguments: --init_method, --rank, --world_size. They count nodes, as on ModelArts. Missing values are
       taken from 3 or 4.
    3. The environment of a launcher of MPI or of a platform, the most specific first: ModelArts, Volcengine,
       SageMaker, SkyPilot, dstack, Slurm, Kubeflow, Kubernetes, Volcano, PAI-DLC or Baidu.
    4. RANK and WORLD_SIZE without a variable of a platform, which count nodes.
    5. Otherwise: one node.

    args: a missing one counts as None.
        init_method: "tcp://host:port", "host:port", or "env://" for MASTER_ADDR and MASTER_PORT.
        rank, world_size: see 2.
        processes_per_node: the processes that a node starts. None: the number of the platform, else 1. A job
            without this argument starts none.
    gpus: the processes of a node, if it is not 0 and processes_per_node is None.
    Raises BadInput with the values, also if 2 contradicts 3 or 4, and for too many processes.
    """
    if gpus and is_distributed(args) and args.processes_per_node is None:
        # one process for each GPU, unless the user gives another number
        args = argparse.Namespace(**vars(args) | {"processes_per_node": gpus})
    # torchrun and the like have started this process: the platform started only torchrun
    if "LOCAL_RANK" in env or "TORCHELASTIC_RUN_ID" in env:
        return _from_launcher(args, env)
    # no launcher of processes: --rank and --world_size count nodes
    options = vars(args)  # a job of one process has none of those that say where it runs
    claim = platforms.detect(env)
    address = _address(options.get("init_method"))
    given = (options.get("rank"), options.get("world_size"))
    # mpirun ... --rank $OMPI_COMM_WORLD_RANK repeats the claim
    if given == (None, None) or (claim and claim.place == given):
        platforms.refuse(env, claim)  # the variables must say how the processes belong together
        place = claim or Claim("modelarts-arguments" if address else "plain", 0, 1, "", None, None)
    else:
        place = _of_arguments(*given, claim, env)
    # --init_method comes first, then the platform, then MASTER_ADDR
    host, port = address or (place.host, place.port)
    if place.nodes > 1 and not host:  # the others would wait for this node until their timeout
        raise BadInput(
            f"{place.said}, but no variable names the first node: set MASTER_ADDR and MASTER_PORT on all "
            "nodes (mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT), or pass --init_method tcp://host:port"
        )
    processes = _processes(args, place)
    level = "node"
    if place.local_rank is not None:  # the platform has started every process itself
        processes = place.processes or 1
        level = "process"
    return Topology(
        place.node_rank, place.nodes, processes, place.local_rank, host, port, level, place.source
    )


def _from_launcher(args: argparse.Namespace, env: Mapping[str, str]) -> Topology:
    started_by_job = STARTED_BY in env  # the parent process has applied the arguments already
    # a script may set some of them by hand: then none of the others is guessed
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT"):
        if name not in env:
            other = "LOCAL_RANK" if "LOCAL_RANK" in env else "TORCHELASTIC_RUN_ID"
            raise BadInput(f"{other} is set, but {name} is not: start the job with torchrun")
    rank = whole(env, "RANK")
    local_rank = whole(env, "LOCAL_RANK")
    size = whole(env, "WORLD_SIZE")
    count = _local_world_size(args, env, rank, local_rank, size)
    elastic = "TORCHELASTIC_RUN_ID" in env
    if not started_by_job:
        _refuse_outer_launcher(env, rank, local_rank, size)
    # Under torchrun two nodes with different numbers of processes can each look consistent.
    names = ("GROUP_RANK", "GROUP_WORLD_SIZE") if elastic else ("NODE_RANK", "AZUREML_NODE_COUNT")
    node_rank, nodes = (rank // count, size // count) if count > 0 else (0, 0)
    # torchrun and Azure ML also give the node: it must be the one that follows from the ranks
    consistent = (
        count > 0
        and 0 <= rank < size
        and size % count == 0
        and rank % count == local_rank
        and (started_by_job or whole(env, names[0], node_rank) == node_rank)
        and (started_by_job or whole(env, names[1], nodes) == nodes)
    )
    if not consistent:
        values = platforms.values_of(env, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", *names)
        raise BadInput(
            f"{values} contradict each other, with {count} processes per node: every node must run the same "
            "number of processes, and a rank be less than its world size"
        )
    is_azure = "NODE_RANK" in env and not started_by_job
    source = "azureml" if is_azure else "launcher"
    if elastic:
        source = "torchrun"
    host = env.get("MASTER_ADDR", "127.0.0.1")
    port = platforms.port(env, "MASTER_PORT")
    return Topology(node_rank, nodes, count, local_rank, host, port, "process", source)


def _refuse_outer_launcher(env: Mapping[str, str], rank: int, local_rank: int, size: int) -> None:
    """Raise BadInput if MPI or Slurm has started several torchrun, or several processes with these ranks, and
    each takes itself for the whole job: all of them would write into one folder."""
    claim = platforms.of_launcher(env)
    if not claim or claim.nodes * (claim.processes or 1) <= 1:
        return
    elastic = "TORCHELASTIC_RUN_ID" in env
    if elastic and env["TORCHELASTIC_RUN_ID"] == "none" and whole(env, "GROUP_WORLD_SIZE", 0) == 1:
        raise BadInput(
            f"GROUP_WORLD_SIZE=1 contradicts {claim.said}: {claim.source} started several torchrun, each "
            "for itself: torchrun --nnodes=N --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT makes one job "
            "of them, and --standalone jobs of their own"
        )
    if size == 1 and not elastic:
        raise BadInput(
            f"RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE=1 contradict {claim.said}: {claim.source} "
            f"started several processes; remove what does not belong to this job: env -u RANK -u "
            "LOCAL_RANK -u WORLD_SIZE ... python"
        )


def _local_world_size(
    args: argparse.Namespace, env: Mapping[str, str], rank: int, local_rank: int, size: int
) -> int:
    """Return the number of processes per node. DeepSpeed calls it LOCAL_SIZE. A script that sets RANK from
    the variables of MPI or Slurm may leave it out. Azure ML does: the number follows from the number of nodes
    or from the first rank of this node; on the first node it is --processes_per_node."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # torchrun, DeepSpeed
        if name in env:
            return whole(env, name)
    claim = platforms.of_launcher(env)
    if claim and claim.processes and claim.place == (rank, size):
        return claim.processes
    nodes = whole(env, "AZUREML_NODE_COUNT", 0)
    if nodes:
        return size // nodes
    node_rank = whole(env, "NODE_RANK", 0)
    if node_rank:  # the ranks before the first one of this node are those of the nodes before it
        return (rank - local_rank) // node_rank
    if "NODE_RANK" not in env and env.get("MASTER_ADDR") in ("127.0.0.1", "localhost", "::1"):
        return size  # one node
    return min(_processes(args, None), max(size, 1))


def _of_arguments(rank: int | None, size: int | None, claim: Claim | None, env: Mapping[str, str]) -> Claim:
    """Return the place of --rank and --world_size. One that is missing (None) is that of the claim, or of one
    node. Raises BadInput if they contradict each other or the claim."""
    # without a platform, nothing else tells the option that is missing
    is_one_node = not rank and size in (None, 1)
    if not claim and not is_one_node and None in (rank, size):
        name, other = ("world_size", "rank") if rank is None else ("rank", "world_size")
        raise BadInput(f"--{name} without --{other}: expected both")
    base = claim or Claim("", 0, 1, "", *platforms.find_master(env, env.get("MASTER_ADDR")))
    rank = base.node_rank if rank is None else rank
    size = base.nodes if size is None else size
    said = f"--rank {rank} --world_size {size}"
    if not 0 <= rank < size:
        raise BadInput(f"{said}: the rank is not in 0..{size - 1}; both count nodes")
    if claim and (rank, size) != (claim.node_rank, claim.nodes):
        raise BadInput(f"{said}, which count nodes, contradict {claim.said}")
    if base.local_rank is not None and base.processes != 1:
        raise BadInput(
            f"{said} count nodes, but {base.source} started {base.processes} processes on each "
            f"({base.said}): leave these options out"
        )
    return replace(base, source="modelarts-arguments", node_rank=rank, nodes=size, said=said)


def _processes(args: argparse.Namespace, claim: Claim | None) -> int:
    """Return the number of processes that a node starts."""
    if not is_distributed(args):
        return 1
    return args.processes_per_node or (claim and claim.processes) or 1


def _address(init_method: str | None) -> tuple[str, int] | None:
    """Parse --init_method: "tcp://host:port" or "host:port", an IPv6 address in brackets. None if it is
    missing or env://."""
    if not init_method or init_method == "env://":
        return None
    match = re.fullmatch(r"(?:tcp://)?(\[[^\[\]]+\]|[^\[\]:/@?#\s]+):(\d+)", init_method, re.ASCII)
    if not match or len(match[2]) > 5 or not 0 < int(match[2]) < 65536:
        raise BadInput(f"--init_method {init_method} is not tcp://host:port with a port in 1..65535")
    return match[1].strip("[]"), int(match[2])
