"""The nodes of a job of several ranks, and the words for ranks."""

import collections
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from bootfile.processes import ranks


class Node(NamedTuple):
    """A node of the job. name: its host name, or its number if several have the same one."""

    name: str
    ranks: tuple[int, ...]


def find_nodes() -> list[Node]:
    """Return the nodes of the job, in the order of their first ranks, on every rank."""
    local_rank = os.environ.get("LOCAL_RANK", "")
    place = (socket.gethostname(), int(local_rank) if local_rank.isdecimal() else -1)
    return group_nodes(ranks.gather_objects(place))


def group_nodes(places: Sequence[tuple[str, int]]) -> list[Node]:
    """Return the nodes. places: for each rank its host name and its local rank, -1 if that is not known."""
    members: dict[tuple[str, int], list[int]] = {}
    counts = collections.Counter[tuple[str, int]]()
    for rank, (host, local_rank) in enumerate(places):
        # two ranks of one host name and one local rank are on two nodes that have the same name
        node_of_host = counts[host, local_rank] if local_rank >= 0 else 0
        counts[host, local_rank] += 1
        members.setdefault((host, node_of_host), []).append(rank)
    nodes_of_host = collections.Counter(host for host, _ in members)
    nodes = []
    for number, ((host, _), ranks_of_node) in enumerate(members.items()):
        name = host if nodes_of_host[host] == 1 else str(number)
        nodes.append(Node(name, tuple(ranks_of_node)))
    return nodes


def show(members: Sequence[int], through: str = "-") -> str:
    """Return ranks in words: "rank 3", or "ranks 0-2, 4"."""
    spans: list[list[int]] = []  # [first, last], or [rank]
    for member in sorted(members):
        if spans and member == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], member]
        else:
            spans.append([member])
    noun = "ranks" if len(members) > 1 else "rank"
    return f"{noun} {', '.join(through.join(map(str, span)) for span in spans)}"
