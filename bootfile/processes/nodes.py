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
        # a local rank that a host name has had already is on another node of that name
        turn = counts[host, local_rank] if local_rank >= 0 else 0
        counts[host, local_rank] += 1
        members.setdefault((host, turn), []).append(rank)
    hosts = collections.Counter(host for host, _ in members)
    nodes = []
    for number, ((host, _), of_node) in enumerate(members.items()):
        nodes.append(Node(host if hosts[host] == 1 else str(number), tuple(of_node)))
    return nodes


def show(members: Sequence[int], through: str = "-") -> str:
    """Return "rank 3", or "ranks 0-2, 4"."""
    spans: list[list[int]] = []
    for member in sorted(members):
        if spans and member == spans[-1][-1] + 1:
            spans[-1].append(member)
        else:
            spans.append([member])
    texts = [f"{span[0]}{through}{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
    return f"rank{'s' if len(members) > 1 else ''} {', '.join(texts)}"
