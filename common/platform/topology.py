"""The layout of a job, and the place of one process in it. This module imports no torch."""

import argparse
from dataclasses import dataclass
from typing import Any, Protocol

from bootfile.ground.errors import BadInput

_MOST_PER_NODE = 1024


class Members(Protocol):
    """The processes of an elastic job (common/elastic/members.py).

    is_alone: whether this process waits to be one of them. generation: -1 then, and 0 until they change.
    """

    is_alone: bool

    @property
    def generation(self) -> int: ...

    def options(self, topology: "Topology", timeout: float) -> dict[str, Any]:
        """Return the arguments of init_process_group(). timeout: seconds of a collective."""


@dataclass(frozen=True)
class Topology:
    """The layout of the job, and the place of this process in it.

    node_rank, nodes: the index of this node, and the number of nodes.
    processes_per_node: the same on every node.
    local_rank: the index of this process on its node; None if it has to start the node's processes.
    master_host, master_port: the address of the first node; None on a single node without one.
    level: "process" if the platform started one process per rank, "node" if it started one per node.
    source: where the layout comes from.
    members: those of an elastic job; None in a job that ends with its first process.
    """

    node_rank: int
    nodes: int
    processes_per_node: int
    local_rank: int | None
    master_host: str | None
    master_port: int | None
    level: str
    source: str
    members: Members | None = None

    def __post_init__(self) -> None:
        if self.processes_per_node > _MOST_PER_NODE:
            raise BadInput(
                f"{self.processes_per_node} processes are too many for a node: at most {_MOST_PER_NODE}"
            )

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
        host = self.master_host or ""
        shown = f"[{host}]" if ":" in host else host  # an IPv6 address
        master = f"{shown}:{self.master_port}" if host else "none"
        return (
            f"topology source={self.source} level={self.level} nodes={self.nodes} "
            f"processes_per_node={self.processes_per_node} node_rank={self.node_rank} master={master}"
        )


def is_distributed(args: argparse.Namespace) -> bool:
    """Return whether the job can have several processes: it has the argument processes_per_node."""
    return hasattr(args, "processes_per_node")
