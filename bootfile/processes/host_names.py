"""The nodes of the ranks. Only a run of several processes loads this module."""

import collections
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from bootfile.processes.ranks import gather_objects


class Node(NamedTuple):
    """A node of the job. name: its host name, or its number if several have the same one."""

    name: str
    ranks: tuple[int, ...]


def find_nodes() -> list[Node]:
    """Return the nodes of the job, in the order of their first ranks, on every rank."""
    local_rank = os.environ.get("LOCAL_RANK", "")
    place = (socket.gethostname(), int(local_rank) if local_rank.isdecimal() else -1)
    return group_nodes(gather_objects(place))


def group_nodes(places: Sequence[tuple[str, int]]) -> list[Node]:
    """Return the nodes. places: for each rank its host name and its local rank, -1 if that is not known."""
    members: dict[tuple[str, int], list[int]] = {}
    counts = collections.Counter[tuple[str, int]]()
    for number, (host, local_rank) in enumerate(places):
        # two ranks of one host name and one local rank are on two nodes that have the same name
        node_of_host = counts[host, local_rank] if local_rank >= 0 else 0
        counts[host, local_rank] += 1
        members.setdefault((host, node_of_host), []).append(number)
    of_host = collections.Counter(host for host, _ in members)
    names = [host if of_host[host] == 1 else str(number) for number, (host, _) in enumerate(members)]
    return [Node(name, tuple(of_node)) for name, of_node in zip(names, members.values(), strict=True)]
