"""Measure the seconds of a step on each rank, and name the rank for which the others wait.

A step is cut where a rank begins and ends to wait for the others: the all_reduce of DistributedDataParallel
after the last gradient, and each block in ranks.waiting(), such as the vote (nonfinite.py). All else is the
rank's own: data or compute. On a GPU the cuts are events, which the host reads when they have passed. One
collective at a report gives all ranks the means of each. In a synchronous job a step takes equally long on
every rank: the slow one is that whose own seconds are more than those of the others.

Outside: waits of which torch does not tell. With FSDP and SyncBatchNorm only slow data is found; a collective
of your own in the forward pass hides a slow rank.
"""

import collections
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bootfile.exact.due import Due
from bootfile.exact.optimizer_steps import parameters_of
from bootfile.exact.plugins import Parts, Plugin
from bootfile.ground import accelerator
from bootfile.processes import ranks
from bootfile.processes.host_names import Node, find_nodes
from bootfile.processes.ranks import show

# the parts of a step
_OWN = ranks.OWN
_WAITING = ranks.WAITING
_BEFORE = 2  # own, until the first forward pass: on a GPU, only here the device waits for data
_END = -1  # not a part: the end of a step

PHASES = ("data", "compute")
_FEWEST = 5  # steps of which a rank is judged, and their seconds: the first ones vary
_SECONDS = 5.0
_TRIES = 4  # steps in a row without a known gradient
_CLEAR = 1.5  # times the seconds of the rank that is named now: then another one is named
_HALF = 0.5


class _Facts(NamedTuple):
    """What the host knows of a step."""

    counts: bool  # the step is measured
    data: float  # seconds in which it waited for the loader
    pause: float  # seconds before it that do not count: of a report, a save or an evaluation
    had_pause: bool


class _Moment:
    """An event of the host: it has passed when it is recorded."""

    def __init__(self, enable_timing: bool):
        pass

    def record(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Moment") -> float:
        return 1000 * (end._at - self._at)


class _Clock:
    """Adds up the seconds between cuts, without waiting for a device. make: returns an event."""

    def __init__(self, make: Callable[..., Any]):
        self._make = make
        self._unused: list[Any] = []
        # events in order, each with the part that it ends, and _Facts of steps that have ended
        self._cuts: collections.deque[tuple[int | None, Any]] = collections.deque()
        self._last: Any = None  # the last event that has passed
        self._seconds = [0.0, 0.0, 0.0]

    def cut(self, part: int | None) -> None:
        """End a part of a step, which began at the last cut. None: the seconds since then do not count."""
        event = self._unused.pop() if self._unused else self._make(enable_timing=True)
        event.record()
        self._cuts.append((part, event))

    def end_step(self, facts: _Facts) -> None:
        self._cuts.append((_END, facts))

    def take(self) -> Iterator[tuple[_Facts, list[float]]]:
        """Yield the steps whose seconds are known, each once."""
        # in the order in which the device passes them: the first that it has not passed ends the search
        while self._cuts and (self._cuts[0][0] == _END or self._cuts[0][1].query()):
            part, event = self._cuts.popleft()
            if part == _END:
                yield event, self._seconds
                self._seconds = [0.0, 0.0, 0.0]
                continue
            if self._last is not None:
                if part is not None:
                    self._seconds[part] += self._last.elapsed_time(event) / 1000
                self._unused.append(self._last)
            self._last = event


class Times(NamedTuple):
    """The mean seconds of a step of one rank, over some steps."""

    steps: float  # how many
    busy: float  # data + compute
    data: float  # waiting for the loader
    waiting: float  # waiting for other ranks
    usual: float  # as `busy`, without the longest step: a single pause of a program makes no rank slow

    @property
    def compute(self) -> float:
        return self.busy - self.data


class Slow(NamedTuple):
    """What slow ranks cost the job."""

    ranks: tuple[int, ...]  # one rank, or all of a node
    phase: str  # in which they differ most from the other ranks
    seconds: float  # time of a step in this phase
    others: float  # the median of the other ranks
    cost: float  # seconds of each step in which the other ranks wait for them
    duration: float  # seconds of a step

    @property
    def share(self) -> float:
        """The share of the time that is lost."""
        return self.cost / self.duration if self.duration else 0.0

    @property
    def more(self) -> float:
        return self.seconds - self.others


class Pace(Plugin):
    """The times of all ranks at each report.

    share: of the time: a rank that costs more is named. says_lost: say at the end what the slowest rank has
    cost.
    """

    def __init__(self, share: float, says_lost: bool = True):
        self._share = share
        self._says_lost = says_lost
        self._nodes: list[Node] = []
        self._hooks: list[Any] = []  # one for each optimizer, on one of its parameters
        self._tries = _TRIES  # steps in which a parameter for a hook is still searched
        self._is_queued = False  # whether torch will call end_backward() at the end of this backward pass
        self._had_backward = False  # in this step
        self._had_forward = False
        self._ended = 0  # steps of this process
        self._unreported = 0  # those since the last report
        self._first = 0  # the first step of those below, which are judged together
        self._busy: list[float] = []
        self._data: list[float] = []
        self._waiting: list[float] = []
        self._waited = 0.0  # seconds of the loader, at the end of the last step
        self._paused_at: float | None = None  # since when nothing counts, until the next batch is asked for
        self._times: list[Times] = []  # those of all ranks at the last report
        self._lost = 0.0  # seconds that the slowest rank of each report has cost
        self._passed = 0.0  # seconds of all these steps

    def begin(self, parts: Parts, step: int) -> None:
        device = accelerator.device_of(parts.forward)
        self._is_device = accelerator.has_streams(device)
        self._clock = _Clock(accelerator.of(device).Event if self._is_device else _Moment)
        if self._is_device:
            parts.forward.register_forward_pre_hook(self._begin_forward)
        # the report's collective needs tensors where the backend of torch.distributed has them
        self._device = torch.device("cpu") if ranks.uses_gloo() else device
        is_synchronised = any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in parts.forward.modules())
        self._waits_inside = parts.state.is_sharded or is_synchronised
        self._loader: Any = parts.loader
        self._say = parts.say
        self._announcer = Announcer(self._share, parts.say)
        self._optimizers: Sequence[torch.optim.Optimizer] = parts.steps.optimizers
        self._first = step + 1
        # one pace in a process: that of an earlier loop, as in a notebook, measures nothing from here on
        ranks.clock = self

    def close(self, error: BaseException | None) -> None:
        """Measure nothing any more, and refer to nothing: this process leaves the training."""
        self._remove_hooks()
        self._optimizers = ()
        if ranks.clock is self:
            ranks.clock = None
        if error is None and self._says_lost and self.lost >= self._share:
            self._say(f"{self.lost:.0%} of the time was lost to the slowest rank")

    def cut(self, part: int) -> None:
        """End a part of the step (ranks.waiting)."""
        self._clock.cut(part)

    # Called by torch within a step.

    def _begin_forward(self, *_: object) -> None:
        """Note that the batch is there: before the first forward pass of a step, on a GPU."""
        if ranks.clock is self and not self._had_forward:  # another loop may use the module now
            self._had_forward = True
            self._clock.cut(_BEFORE)

    def _note_gradient(self, _: torch.Tensor) -> None:
        """Measure when this backward pass ends, and how long it waits for other ranks then. autograd calls
        this for one parameter of each optimizer.

        The engine of autograd calls functions of a queue at the end of a pass. DistributedDataParallel adds
        its wait for the other ranks to the queue when its last gradient is there. So end_backward() is
        called before that wait, and end_wait(), which end_backward() adds, after it.
        """
        if self._is_queued or ranks.clock is not self:
            return
        self._is_queued = True  # once for each backward pass, though several optimizers have a hook
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def end_backward() -> None:
            self._clock.cut(_OWN)
            self._had_backward = True
            queue(end_wait)

        def end_wait() -> None:
            self._clock.cut(_WAITING)
            self._is_queued = False

        queue(end_backward)

    # Called by the loop.

    def numbers(self) -> list[float]:
        """Choose the parameters with hooks again if no backward pass was noticed. Nothing is sent."""
        self._is_queued = False  # also after a backward pass that has failed
        if self._had_backward:
            self._tries = _TRIES
        elif self._tries:
            self._tries -= 1
            self._hook()
        return []

    def _hook(self) -> None:
        """Put a hook on one parameter of each optimizer that has a gradient now: it is the first step, or
        layers with hooks were frozen or replaced."""
        self._remove_hooks()
        # one parameter is enough: its gradient says that a backward pass runs, not when it ends
        for optimizer in self._optimizers:
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None and parameter.is_leaf and parameter.requires_grad:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._note_gradient))
                    break

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def ended(self, step: int, due: Due) -> None:
        """End a step, on every rank. With a report, all ranks exchange their seconds."""
        loader = self._loader
        self._ended += 1
        self._unreported += 1
        waited = getattr(loader, "waited", 0.0)  # a loader of one's own may not have it
        pause = 0.0
        # after a report or an epoch there may be an evaluation or a save, until a batch is asked for
        if self._paused_at is not None:
            pause = max(0.0, getattr(loader, "asked_at", self._paused_at) - self._paused_at)
        # not the first step of a process, which compiles; without a sign of a backward pass in several steps
        # the waits for others cannot be told from computing
        counts = self._ended > 1 and (self._had_backward or not self._tries)
        # on a GPU its seconds may be known only some steps later: the facts of the host wait with the events
        self._clock.end_step(_Facts(counts, waited - self._waited, pause, self._paused_at is not None))
        self._waited = waited
        self._paused_at = None
        self._had_backward = self._had_forward = False
        for facts, seconds in self._clock.take():
            if facts.counts:
                self._keep(facts, seconds)
        # a collective: the answer is the same on every rank
        if due.report and self._ended > 1:
            self._report(step)
        if due.report or step % len(loader) == 0:  # an evaluation or a save may follow
            self._clock.cut(None)
            self._paused_at = time.perf_counter()

    def _keep(self, facts: _Facts, seconds: list[float]) -> None:
        busy = max(0.0, seconds[_OWN] + seconds[_BEFORE] - facts.pause)
        # a device that computes while the host waits for data loses nothing
        most = seconds[_BEFORE] if self._is_device and seconds[_BEFORE] else busy
        self._busy.append(busy)
        self._data.append(min(facts.data, most, busy))
        if not facts.had_pause:  # else the others may have waited for a save of rank 0
            self._waiting.append(seconds[_WAITING])

    def _report(self, step: int) -> None:
        """Gather the seconds of all ranks, and say what has changed. Called on every rank."""
        unreported = self._unreported
        self._unreported = 0
        # once, at the first report: ranks do not move to another node
        self._nodes = self._nodes or find_nodes()
        own = summarize(self._busy, self._data, self._waiting)
        values = torch.tensor(own, dtype=torch.float32, device=self._device)
        # every rank needs all times: each finds the same slowest one, and rank 0 prints it
        rows = [torch.empty_like(values) for _ in range(ranks.world_size())]
        torch.distributed.all_gather(rows, values)
        times = [Times(*row) for row in torch.stack(rows).tolist()]
        fewest = min(each.steps for each in times)
        self._times = times if fewest else []  # on a GPU the first steps may not have passed yet
        if not fewest:
            return
        waits_inside = self._waits_inside or not self._tries
        slowest = find_slowest(times, self._nodes, waits_inside)
        self._lost += slowest.cost * unreported
        self._passed += slowest.duration * unreported
        # until they are enough, the steps until the next report are added to these
        if fewest >= _FEWEST and fewest * slowest.duration >= _SECONDS:
            self._announcer.note(self._first, step, times, self._nodes, waits_inside)
            self._first = step + 1
            self._busy, self._data, self._waiting = [], [], []

    def figures(self) -> dict[str, Any]:
        """Return the seconds of a step over all ranks at the last report, phase -> min, median, max and the
        rank of the max, and the share of the time that was lost to the slowest ones so far; {} before the
        first. The same on every rank."""
        table: dict[str, Any] = {}
        for name in ("busy", *PHASES, "waiting") if self._times else ():
            values: list[float] = [getattr(times, name) for times in self._times]
            middle, highest = statistics.median(values), max(values)
            rounded = {"min": min(values), "median": middle, "max": highest}
            table[name] = {key: round(value, 6) for key, value in rounded.items()}
            table[name]["rank"] = values.index(highest)
        return table | {"lost": round(self.lost, 4)} if table else {}

    @property
    def lost(self) -> float:
        """The share of the time that was lost to the slowest rank so far, 0..1; 0 before a report."""
        return min(1.0, self._lost / self._passed) if self._passed else 0.0


def summarize(busy: list[float], data: list[float], waiting: list[float]) -> Times:
    """Return the times of this rank, from the seconds of its steps."""
    count = len(busy)
    if not count:
        return Times(0, 0, 0, 0, 0)
    total = sum(busy)
    usual = (total - max(busy)) / (count - 1) if count > 1 else total
    return Times(count, total / count, sum(data) / count, sum(waiting) / max(1, len(waiting)), usual)


def measure(
    times: Sequence[Times], chosen: tuple[int, ...], waits_inside: bool = False, phase: str = ""
) -> Slow:
    """Return what the chosen ranks cost, in this phase (default: in which they differ most from the others).
    waits_inside: see find_slowest()."""
    chosen_times = [times[rank] for rank in chosen]
    other_times = [other for rank, other in enumerate(times) if rank not in chosen]
    means = {}
    medians = {}
    more = {}  # how many seconds more the chosen ranks need than the others
    for name in (*PHASES, "usual"):
        means[name] = statistics.fmean([getattr(one, name) for one in chosen_times])
        # the median: one of the others may be slow, too
        medians[name] = statistics.median([getattr(other, name) for other in other_times])
        more[name] = means[name] - medians[name]
    # the others wait for slow data while they compute
    waits_for_data = waits_inside and more["compute"] < -more["data"] * _HALF
    cost = more["data"] if waits_for_data else more["usual"]
    phase = phase or max(PHASES, key=more.__getitem__)
    duration = statistics.fmean([one.busy + one.waiting for one in chosen_times])
    return Slow(chosen, phase, means[phase], medians[phase], max(0.0, cost), duration)


def find_slowest(times: Sequence[Times], nodes: Sequence[Node], waits_inside: bool = False) -> Slow:
    """Return the rank, or the node of several ranks, that costs most.

    times: of each rank, at least two. waits_inside: whether ranks also wait for each other unseen while they
    compute (FSDP, torch.nn.SyncBatchNorm): then a slow rank shows only in its data.
    """
    costs = [measure(times, (rank,), waits_inside) for rank in range(len(times))]
    slowest = max(costs, key=lambda slow: slow.cost)
    for node in nodes:
        outside = [other for rank, other in enumerate(times) if rank not in node.ranks]
        if len(node.ranks) == 1 or not outside:
            continue
        # a node explains more than its slowest rank only if each of its ranks is slow
        whole = measure(times, node.ranks, waits_inside)
        least = min(measure([times[rank], *outside], (0,), waits_inside).cost for rank in node.ranks)
        if least > whole.cost * _HALF > 0 and whole.cost > slowest.cost * _HALF:
            slowest = whole
    return slowest


class Announcer:
    """Says once that a rank is slow, and again when it is another one or none.

    share: of the time, from which on a rank is named. say: prints a line.
    """

    def __init__(self, share: float, say: Callable[[str], object]):
        self._share = share
        self._say = say
        self._named: Slow | None = None

    def note(
        self,
        first: int,
        step: int,
        times: Sequence[Times],
        nodes: Sequence[Node],
        waits_inside: bool = False,
    ) -> None:
        """Print which rank is slow, if it is another one than before, or that none is any more. first, step:
        the first and the last step of these times. The others: as in find_slowest()."""
        slowest = find_slowest(times, nodes, waits_inside)
        if named := self._named:
            # the rank that was named stays it until it is not slow, or another one clearly costs more
            now = measure(times, named.ranks, waits_inside, named.phase)
            is_slow = now.share >= self._share * _HALF
            if is_slow and slowest.more <= now.more * _CLEAR:
                return
            if not is_slow:
                self._say(f"{_name(named, nodes)} is not slow any more after step {step}")
            self._named = None
        if slowest.share >= self._share:
            self._named = slowest
            self._say(
                f"slowest {_name(slowest, nodes)}: {slowest.phase} {slowest.seconds:.3g} s of each step, "
                f"median of the others {slowest.others:.2g}, since step {first}"
            )


def _name(slow: Slow, nodes: Sequence[Node]) -> str:
    """Return "rank 3 (node b)", or "node b (ranks 2 to 3)"."""
    first = slow.ranks[0]
    node = next(node for node in nodes if first in node.ranks)
    if len(slow.ranks) == 1:
        return f"rank {first} (node {node.name})"
    return f"node {node.name} ({show(slow.ranks).replace('-', ' to ')})"
