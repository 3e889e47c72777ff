"""Find which rank costs the job time, and in what, from the seconds of all ranks.

In a synchronous job each step takes equally long on every rank. So a slow rank is not the one whose step is
long: it waits least for the others, and its own seconds are more than theirs.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

PHASES = ("data", "compute")
_MUCH_MORE = 1.5  # times the seconds of the rank that is named now: then another one is named
_HALF = 0.5


class Times(NamedTuple):
    """The mean seconds of a step of one rank, over the last steps.

    steps: that were measured. busy: without waiting for other ranks: data + compute. data: waiting for the
    loader. waiting: for other ranks. usual: as `busy`, without the step that took longest. slow_steps: those
    that took more than twice the median, and peaks: their seconds above it, as a mean over all steps. ago:
    steps since the busy seconds became larger.
    """

    steps: float
    busy: float
    data: float
    waiting: float
    usual: float
    slow_steps: float
    peaks: float
    ago: float

    @property
    def compute(self) -> float:
        return self.busy - self.data


class Node(NamedTuple):
    """A node of the job. name: its host name, or its number if several have the same one."""

    name: str
    ranks: tuple[int, ...]


class Slow(NamedTuple):
    """What costs the job time.

    ranks: one rank, or all ranks of a node. phase: that in which they differ most from the others. seconds:
    in this phase, in each step; others: the median of those of the others. cost: seconds of each step that
    the others wait for them, of `duration` seconds. ago: steps since it began.
    """

    ranks: tuple[int, ...]
    phase: str
    seconds: float
    others: float
    cost: float
    duration: float
    ago: int

    @property
    def share(self) -> float:
        """Return the share of the time that is lost."""
        return self.cost / self.duration if self.duration else 0.0

    @property
    def more(self) -> float:
        """Return how many seconds more than the others they need in the phase."""
        return self.seconds - self.others


def make_nodes(places: Sequence[tuple[str, int]]) -> list[Node]:
    """Return the nodes of the job. places: for each rank its host name and its local rank, -1 if that is not
    known. A local rank that does not rise begins another node, also one of the same host name."""
    members: dict[tuple[str, int], list[int]] = {}
    counts: dict[str, int] = {}  # nodes of each host name so far
    last: dict[str, int] = {}  # local rank of the last rank of each host name
    for rank, (host, local_rank) in enumerate(places):
        # a launcher counts the local ranks of a node up: a number that does not rise is another node
        is_new = host not in last or 0 <= local_rank <= last[host]
        if is_new:
            counts[host] = counts.get(host, 0) + 1
        last[host] = local_rank
        members.setdefault((host, counts[host]), []).append(rank)
    nodes = []
    for number, ((host, _), ranks) in enumerate(members.items()):
        name = host if counts[host] == 1 else str(number)
        nodes.append(Node(name, tuple(ranks)))
    return nodes


def find_slowest(times: Sequence[Times], nodes: Sequence[Node], waits_inside: bool = False) -> Slow:
    """Return the rank, or the node of several ranks, that costs most.

    times: of each rank, at least two. waits_inside: whether ranks also wait for each other unseen while they
    compute (FSDP, torch.nn.SyncBatchNorm): then a slow rank shows only in its data.
    """
    # every rank has the times of all, so each finds the same one without a further collective
    slowest = measure(times, (0,), waits_inside)
    for rank in range(1, len(times)):
        slow = measure(times, (rank,), waits_inside)
        if slow.cost > slowest.cost:
            slowest = slow
    for node in nodes:
        if not 1 < len(node.ranks) < len(times):
            continue
        whole = measure(times, node.ranks, waits_inside)
        # a node is named only if its ranks are slow one by one: else it is one slow rank of it
        least = min(_cost_alone(times, rank, node, waits_inside) for rank in node.ranks)
        # a node explains more than its slowest rank only if each of its ranks is slow
        if least > whole.cost * _HALF > 0 and whole.cost > slowest.cost * _HALF:
            slowest = whole
    return slowest


def measure(
    times: Sequence[Times], ranks: tuple[int, ...], waits_inside: bool = False, phase: str = ""
) -> Slow:
    """Return what these ranks cost. phase: look at this one. Other parameters: see find_slowest()."""
    # against the median of the others, of which one may be slow, too
    chosen = [times[rank] for rank in ranks]
    others = [other for rank, other in enumerate(times) if rank not in ranks]
    more = {name: _mean(chosen, name) - _median(others, name) for name in PHASES}
    cost = _mean(chosen, "usual") - _median(others, "usual")
    if waits_inside and more["compute"] < -more["data"] * _HALF:
        cost = more["data"]  # the others wait for these data while they compute
    if not phase:
        phase = max(PHASES, key=more.__getitem__)
    return Slow(
        ranks,
        phase,
        _mean(chosen, phase),
        _median(others, phase),
        max(0.0, cost),
        _mean(chosen, "busy") + _mean(chosen, "waiting"),
        int(max(one.ago for one in chosen)),
    )


def _cost_alone(times: Sequence[Times], rank: int, node: Node, waits_inside: bool) -> float:
    """Return what one rank of a node costs, compared with the ranks of other nodes."""
    outside = [other for number, other in enumerate(times) if number not in node.ranks]
    return measure([times[rank], *outside], (0,), waits_inside).cost


def _mean(times: Sequence[Times], name: str) -> float:
    values: list[float] = [getattr(time, name) for time in times]
    return statistics.fmean(values)


def _median(times: Sequence[Times], name: str) -> float:
    values: list[float] = [getattr(time, name) for time in times]
    return statistics.median(values)


class Announcer:
    """Says once that a rank is slow, and again when it is another one or none.

    share: of the time, from which on a rank is named. say: prints a line.
    """

    def __init__(self, share: float, say: Callable[[str], object]):
        self._share = share
        self._say = say
        self._seen: tuple[tuple[int, ...], str] | None = None  # ranks and phase that cost most now
        self._seen_since = 0  # the step from which on
        self._named: Slow | None = None
        self._since = 0  # the step from which on it is slow
        self._lost = 0.0  # seconds that it has cost
        self._passed = 0.0  # seconds of all steps since it was named

    def note(
        self,
        step: int,
        steps: int,
        times: Sequence[Times],
        nodes: Sequence[Node],
        waits_inside: bool = False,
        is_sure: bool = True,
    ) -> None:
        """Say what has changed. step: the last one. steps: since the last call. is_sure: whether the times
        are those of enough steps to name a rank. Others: as in find_slowest()."""
        slowest = find_slowest(times, nodes, waits_inside)
        # also if the times are not sure yet: the line then says since when, and not since the report
        self._see(slowest, step)
        if not is_sure:
            return
        named = self._named
        if named:
            # the rank that was named stays it until it is not slow, or another one clearly costs more
            now = measure(times, named.ranks, waits_inside, named.phase)
            self._lost += now.cost * steps
            self._passed += now.duration * steps
            is_other = (slowest.ranks, slowest.phase) != (named.ranks, named.phase)
            is_clear = slowest.share >= self._share and slowest.more > now.more * _MUCH_MORE
            if not (is_other and is_clear):
                if now.share >= self._share * _HALF:
                    return  # it is still slow, and it was named
                self._say(
                    f"{_name(named, nodes)} is not slow any more after step {step}: since step {self._since} "
                    f"it cost {self._lost / self._passed:.0%} of the time"
                )
                self._named = None
        if slowest.share < self._share:
            return
        # not named so far, or another one than before: one line
        self._named = slowest
        self._since = self._seen_since
        self._lost = slowest.cost * steps
        self._passed = slowest.duration * steps
        self._say(f"{_describe(slowest, times, nodes)}, since step {self._since}")

    def _see(self, slowest: Slow, step: int) -> None:
        """Note since when these ranks cost most: it may be longer than their times reach back."""
        if slowest.share < self._share:
            self._seen = None
        elif self._seen != (slowest.ranks, slowest.phase):
            self._seen = (slowest.ranks, slowest.phase)
            self._seen_since = step - slowest.ago


def _describe(slow: Slow, times: Sequence[Times], nodes: Sequence[Node]) -> str:
    """Return the words that name a slow rank or node."""
    peaks = _mean([times[rank] for rank in slow.ranks], "peaks")
    part = ""
    if peaks > slow.more * _HALF:  # a rank that is slow now and then
        worst = times[slow.ranks[0]]
        part = f", most of it in {worst.slow_steps:.0f} of {worst.steps:.0f} steps"
    return (
        f"slowest {_name(slow, nodes)}: {slow.phase} {slow.seconds:.3g} s of each step, median of the others "
        f"{slow.others:.2g}{part}"
    )


def _name(slow: Slow, nodes: Sequence[Node]) -> str:
    """Return "rank 3 (node b)", or "node b (ranks 2 to 3)"."""
    first = slow.ranks[0]
    node = next(node for node in nodes if first in node.ranks)
    if len(slow.ranks) == 1:
        return f"rank {first} (node {node.name})"
    if slow.ranks == tuple(range(first, slow.ranks[-1] + 1)):
        return f"node {node.name} (ranks {first} to {slow.ranks[-1]})"
    return f"node {node.name} (ranks {', '.join(map(str, slow.ranks))})"


def figures(times: Sequence[Times]) -> dict[str, dict[str, float]]:
    """Return the seconds of a step over all ranks: phase -> min, median, max, and the rank of the max."""
    table = {}
    for name in ("busy", *PHASES, "waiting"):
        values = [float(getattr(time, name)) for time in times]
        table[name] = {
            "min": round(min(values), 6),
            "median": round(statistics.median(values), 6),
            "max": round(max(values), 6),
            "rank": values.index(max(values)),
        }
    return table
