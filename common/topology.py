"""Who is who: what a platform says of nodes and processes, resolved once. Pure Python, no torch."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from common.exits import BadInput


@dataclass(frozen=True)
class Topology:
    """Where this process stands.

    level: "process" where the platform started one process per rank (local_rank is set), "node" where it
    started one per node, which starts the others (local_rank is None). master_host is None on a single node
    that was told none. source: which of the rules below spoke.
    """

    node_rank: int
    nodes: int
    processes_per_node: int
    local_rank: int | None
    master_host: str | None
    master_port: int | None
    level: str
    source: str

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def rank(self) -> int:
        """Global rank; of a node that has yet to start its processes, the rank of the first of them."""
        return self.node_rank * self.processes_per_node + (self.local_rank or 0)

    def __str__(self) -> str:
        master = f"{self.master_host}:{self.master_port}" if self.master_host else "none"
        return (
            f"topology source={self.source} level={self.level} nodes={self.nodes} "
            f"processes_per_node={self.processes_per_node} node_rank={self.node_rank} master={master}"
        )


def resolve(args: argparse.Namespace, env: Mapping[str, str]) -> Topology:
    """The first of these that speaks, from the most specific to the least:

    1. LOCAL_RANK in the environment: torchrun, torch.distributed.launch, or a job that started its own
    processes. 2. --init_method, --rank, --world_size: ModelArts; they count nodes. 3. nothing: one node.

    args: init_method, rank and world_size, None where they were not given; processes_per_node, what a node
    starts where it has to. Raises BadInput with the values.
    """
    if "LOCAL_RANK" in env:
        return _from_launcher(env)
    init_method, rank, world_size = args.init_method, args.rank, args.world_size
    if world_size is not None and world_size < 1:
        raise BadInput(f"--world_size {world_size} is not at least 1")
    nodes, node_rank = world_size or 1, rank or 0
    if not 0 <= node_rank < nodes:
        raise BadInput(f"--rank {node_rank} is not in 0..{nodes - 1}: --world_size {nodes} counts nodes")
    if nodes > 1 and rank is None:
        raise BadInput(f"--world_size {nodes} without --rank")
    if nodes > 1 and not init_method:
        raise BadInput(f"--world_size {nodes} without --init_method tcp://host:port")
    host, port = _host_and_port(init_method) if init_method else (None, None)
    source = "plain" if init_method is None and world_size is None else "modelarts-arguments"
    return Topology(node_rank, nodes, args.processes_per_node, None, host, port, "node", source)


def _from_launcher(env: Mapping[str, str]) -> Topology:
    values = {}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        try:
            values[name] = int(env[name])
        except KeyError:
            raise BadInput(f"LOCAL_RANK is set, but {name} is not: start the job with torchrun") from None
        except ValueError:
            raise BadInput(f"{name}={env[name]} is not a whole number") from None
    rank, local_rank, local_size = values["RANK"], values["LOCAL_RANK"], values["LOCAL_WORLD_SIZE"]
    if local_size < 1 or values["WORLD_SIZE"] % local_size or rank % local_size != local_rank:
        raise BadInput(
            f"RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={values['WORLD_SIZE']} "
            f"LOCAL_WORLD_SIZE={local_size} contradict each other: "
            "every node must run the same number of processes"
        )
    return Topology(
        node_rank=rank // local_size,
        nodes=values["WORLD_SIZE"] // local_size,
        processes_per_node=local_size,
        local_rank=local_rank,
        master_host=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=values["MASTER_PORT"],
        level="process",
        source="torchrun" if "TORCHELASTIC_RUN_ID" in env else "launcher",
    )


def _host_and_port(init_method: str) -> tuple[str, int]:
    """ "tcp://host:port" or "host:port" -> (host, port)."""
    scheme, _, address = init_method.rpartition("://")
    host, _, port = address.rpartition(":")
    if scheme not in ("", "tcp") or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInput(f"--init_method {init_method} is not tcp://host:port with a port in 1..65535")
    return host.strip("[]"), int(port)
