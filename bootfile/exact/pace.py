"""Measure on each rank the seconds of a step: waiting for data, computing, waiting for other ranks.

A step is cut where a rank begins and ends to wait for the others: the all_reduce of DistributedDataParallel
after the last gradient, and each block in waiting(), such as the vote (nonfinite.py). All else is the rank's
own. On a GPU the cuts are events, which the host reads when they have passed: it waits for none. There is no
thread. At each report one collective gathers a few numbers of each rank.
"""

import collections
import math
import os
import socket
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bootfile.exact.due import Due
from bootfile.exact.plugins import Parts, Plugin
from bootfile.exact.slowest import Announcer, Node, Times, figures, find_slowest, make_nodes
from bootfile.ground import accelerator
from bootfile.processes import ranks

# the parts of a step
_OWN = ranks.OWN
_WAITING = ranks.WAITING
_BEFORE = 2  # own, until the first forward pass: on a GPU, only here the device waits for data

_SKIPPED = 1  # first steps of a process, which compile
_MOST = 20_000  # steps that are kept
_STEPS = 20  # the least that are looked at: some are slow only now and then
_SECONDS = 5.0
_FEWEST = 5  # from which on a rank is named
_CLEAR = 1.5  # times the seconds of the steps before: from there on a rank is slow
_TRIES = 4  # steps in a row without a known gradient


class _Context(NamedTuple):
    """What the host knows about a step when it ends.

    step: its number. counts: whether it is measured. data: seconds of waiting for the loader. pause: seconds
    before it that do not count: a report, a save, an evaluation. is_after: whether there was one.
    """

    step: int
    counts: bool
    data: float
    pause: float
    is_after: bool


class _Step(NamedTuple):
    """A step that was measured, in seconds. waiting: None if others may have waited for a save of rank 0."""

    step: int
    busy: float
    data: float
    waiting: float | None


class _HostClock:
    """Adds up the seconds between cuts by the clock of the host."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds = [0.0, 0.0, 0.0]
        self._ended: list[tuple[_Context, list[float]]] = []

    def cut(self, part: int) -> None:
        """End a part of a step, which began at the last cut."""
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def restart(self) -> None:
        """Begin to measure here: the time since the last cut does not count."""
        self._last = time.perf_counter()

    def end_step(self, context: _Context) -> None:
        self._ended.append((context, self._seconds))
        self._seconds = [0.0, 0.0, 0.0]

    def take(self) -> list[tuple[_Context, list[float]]]:
        """Return the steps whose seconds are known, each once."""
        ended = self._ended
        self._ended = []
        return ended


class _DeviceClock:
    """Adds up the seconds between cuts by events of a device, without waiting for it."""

    def __init__(self, device: torch.device):
        self._make = accelerator.of(device).Event
        self._unused: list[Any] = []
        # events in order, each with the part that it ends, and contexts of steps that have ended
        self._cuts: collections.deque[tuple[int | None, Any]] = collections.deque()
        self._last: Any = None  # the last event that has passed
        self._seconds = [0.0, 0.0, 0.0]

    def cut(self, part: int | None) -> None:
        """End a part of a step, as that of _HostClock. None: the part does not count."""
        event = self._unused.pop() if self._unused else self._make(enable_timing=True)
        event.record()
        self._cuts.append((part, event))

    def restart(self) -> None:
        self.cut(None)

    def end_step(self, context: _Context) -> None:
        self._cuts.append((None, context))

    def take(self) -> list[tuple[_Context, list[float]]]:
        ended = []
        while self._cuts:
            # in the order in which the device passes them: the first that it has not passed ends the search
            part, event = self._cuts[0]
            if isinstance(event, _Context):
                ended.append((event, self._seconds))
                self._seconds = [0.0, 0.0, 0.0]
                self._cuts.popleft()
                continue
            if not event.query():
                break
            # the first event of all has no event before it to measure from
            if self._last is not None:
                if part is not None:
                    self._seconds[part] += self._last.elapsed_time(event) / 1000
                self._unused.append(self._last)
            self._last = event
            self._cuts.popleft()
        return ended


class Pace(Plugin):
    """The seconds of each step on this rank, and those of all ranks at each report.

    share: of the time: a rank that costs more is named. says_lost: say at the end what the slowest rank has
    cost.
    """

    def __init__(self, share: float, says_lost: bool = True):
        self._share = share
        self._says_lost = says_lost
        self._nodes: list[Node] = []
        self._hooks: list[Any] = []  # one for each optimizer, on one of its parameters
        self._tries = _TRIES
        self._is_queued = False  # whether the end of the present backward pass is awaited
        self._had_backward = False  # in this step
        self._had_forward = False
        self._steps: collections.deque[_Step] = collections.deque(maxlen=_MOST)
        self._ended = 0  # steps of this process
        self._unreported = 0  # those since the last report
        self._waited = 0.0  # seconds of the loader, at the end of the last step
        self._paused_at: float | None = None  # since when nothing counts, until the next batch is asked for
        self._times: list[Times] = []  # those of all ranks at the last report
        self._lost = 0.0  # seconds that the slowest rank of each report has cost
        self._passed = 0.0  # seconds of all these steps

    def begin(self, parts: Parts, step: int) -> None:
        device = accelerator.device_of(parts.forward)
        self._is_device = accelerator.has_streams(device)
        self._clock: _HostClock | _DeviceClock = _HostClock()
        if self._is_device:
            self._clock = _DeviceClock(device)
            parts.forward.register_forward_pre_hook(self._begin_forward)
        # the report's collective needs tensors where the backend of torch.distributed has them
        self._device = torch.device("cpu") if ranks.uses_gloo() else device
        self._waits_inside = parts.state.is_sharded or _has_sync_batchnorm(parts.forward)
        self._loader: Any = parts.loader
        self._say = parts.say
        self._announcer = Announcer(self._share, parts.say)
        self._optimizers: Sequence[torch.optim.Optimizer] = parts.steps.optimizers
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

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def cut(self, part: int) -> None:
        """End a part of the step."""
        self._clock.cut(part)

    # Called by torch within a step.

    def _begin_forward(self, *_: object) -> None:
        """Note that the batch is there: before the first forward pass of a step, on a GPU."""
        if ranks.clock is self and not self._had_forward:  # another loop may use the module now
            self._had_forward = True
            self._clock.cut(_BEFORE)

    def _note_gradient(self, _: torch.Tensor) -> None:
        """Ask to be called at the end of this backward pass: autograd calls this for one parameter of each
        optimizer. DistributedDataParallel asks for the same later, when its last gradient is there, and waits
        for the other ranks in its turn. So the first call is before its wait, and the second after it."""
        if self._is_queued or ranks.clock is not self:
            return
        # once for each backward pass, though several optimizers have a hook
        self._is_queued = True
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
        """Find out when gradients are complete, before the vote, which sends nothing for this class."""
        self._is_queued = False  # also after a backward pass that has failed
        if self._had_backward:
            self._tries = _TRIES
        elif self._tries:
            self._hook()
        return []

    def _hook(self) -> None:
        """Watch one parameter of each optimizer that has a gradient now, because none was seen in this step:
        it is the first one, or layers were frozen or replaced."""
        self._remove_hooks()
        self._tries -= 1
        # some steps without a sign of a backward pass: then a wait for others cannot be told from computing
        if not self._tries:  # torch does not tell when these parameters get their gradients
            self._waits_inside = True
            return
        # one parameter is enough: its gradient says that a backward pass runs, not when it ends
        for optimizer in self._optimizers:
            parameters = []
            for group in optimizer.param_groups:
                parameters += group["params"]
            for parameter in parameters:
                if parameter.grad is not None and parameter.is_leaf and parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(self._note_gradient)
                    self._hooks.append(hook)
                    break

    def ended(self, step: int, due: Due) -> None:
        """End a step, on every rank. With a report, all ranks exchange their seconds."""
        loader = self._loader
        self._ended += 1
        self._unreported += 1
        waited = getattr(loader, "waited", 0.0)
        pause = 0.0
        # after a report or an epoch there may be an evaluation or a save, until a batch is asked for
        if self._paused_at is not None:
            pause = max(0.0, getattr(loader, "asked_at", self._paused_at) - self._paused_at)
        is_measured = self._had_backward or not self._hooks
        counts = self._ended > _SKIPPED and is_measured
        is_after = self._paused_at is not None
        # on a GPU its seconds may be known only some steps later: the facts of the host wait with the events
        self._clock.end_step(_Context(step, counts, waited - self._waited, pause, is_after))
        self._waited = waited
        self._paused_at = None
        self._had_backward = False
        self._had_forward = False
        self._keep()
        # a collective: the answer is the same on every rank
        if due.report and self._ended > _SKIPPED:
            self._report(step)
        if due.report or step % len(loader) == 0:  # an evaluation or a save may follow
            self._clock.restart()
            self._paused_at = time.perf_counter()

    def _keep(self) -> None:
        """Keep the steps whose seconds are known by now."""
        for context, seconds in self._clock.take():
            if not context.counts:
                continue
            busy = max(0.0, seconds[_OWN] + seconds[_BEFORE] - context.pause)
            # a device that computes while the host waits for data loses nothing
            most = seconds[_BEFORE] if self._is_device and seconds[_BEFORE] else busy
            waiting_seconds: float | None = seconds[_WAITING]
            if context.is_after:  # the others may have waited for a save of rank 0
                waiting_seconds = None
            self._steps.append(_Step(context.step, busy, min(context.data, most, busy), waiting_seconds))

    def _report(self, step: int) -> None:
        """Gather the seconds of all ranks, and say what has changed. Called on every rank."""
        unreported = self._unreported
        self._trim(unreported)
        self._unreported = 0
        self._times = self._gather(_summarize(list(self._steps), step))
        # once, at the first report: ranks do not move to another node
        if not self._nodes:
            local_rank = os.environ.get("LOCAL_RANK", "")
            number = -1  # not known
            if local_rank.isdecimal():
                number = int(local_rank)
            place = (socket.gethostname(), number)
            self._nodes = make_nodes([(host, of_host) for host, of_host in ranks.gather_objects(place)])
        fewest = min(times.steps for times in self._times)
        if not fewest:  # on a GPU the first steps may not have passed yet
            self._times = []
            return
        slowest = find_slowest(self._times, self._nodes, self._waits_inside)
        self._lost += slowest.cost * unreported
        self._passed += slowest.duration * unreported
        # a rank is named only after enough steps and seconds: the first ones vary
        is_sure = fewest >= _FEWEST and fewest * slowest.duration >= _SECONDS
        self._announcer.note(step, unreported, self._times, self._nodes, self._waits_inside, is_sure)

    def _trim(self, unreported: int) -> None:
        """Keep the steps since the last report, and at least _STEPS of them that took _SECONDS."""
        seconds = 0.0
        kept = 0
        for one in reversed(self._steps):
            if kept >= max(_STEPS, unreported) and seconds >= _SECONDS:
                break
            kept += 1
            seconds += one.busy + (one.waiting or 0.0)
        while len(self._steps) > kept:
            self._steps.popleft()

    def _gather(self, times: Times) -> list[Times]:
        """Return the times of all ranks on every rank."""
        # every rank needs all times: each finds the same slowest one, and rank 0 prints it
        values = torch.tensor(times, dtype=torch.float32, device=self._device)
        rows = [torch.empty_like(values) for _ in range(ranks.world_size())]
        torch.distributed.all_gather(rows, values)
        return [Times(*row) for row in torch.stack(rows).tolist()]

    def figures(self) -> dict[str, Any]:
        """Return the seconds of a step over all ranks at the last report, and the share of the time that was
        lost to the slowest ones so far; {} before the first. The same on every rank."""
        return {**figures(self._times), "lost": round(self.lost, 4)} if self._times else {}

    @property
    def lost(self) -> float:
        """Return the share of the time that was lost to the slowest rank so far, 0..1."""
        if not self._passed:  # before the first report
            return 0.0
        return min(1.0, self._lost / self._passed)


def _summarize(steps: list[_Step], step: int) -> Times:
    """Return the times of this rank over these steps. step: the last one."""
    count = len(steps)
    if not count:
        return Times(0, 0, 0, 0, 0, 0, 0, 0)
    busy = [one.busy for one in steps]
    waited = [one.waiting for one in steps if one.waiting is not None]
    total = sum(busy)
    highest = max(busy)
    usual = total / count
    if count > 1:  # one pause of a program is not a slow rank
        usual = (total - highest) / (count - 1)
    # pauses now and then: steps of more than twice the usual seconds, as the mean over all steps
    typical = statistics.median(busy)
    peaks = [seconds - typical for seconds in busy if seconds > 2 * typical]
    return Times(
        count,
        total / count,
        sum(one.data for one in steps) / count,
        sum(waited) / max(1, len(waited)),
        usual,
        len(peaks),
        sum(peaks) / count,
        step - _find_onset(steps, 2 * typical),
    )


def _find_onset(steps: list[_Step], slow: float) -> int:
    """Return the step from which on the busy seconds were larger: where the means before and after it differ
    most. The highest fifth counts as its least one, so that single slow steps do not move it. If there is no
    such step: the first that took more than `slow` seconds, or the first of all."""
    count = len(steps)
    most = sorted(one.busy for one in steps)[count * 4 // 5]
    busy = [min(one.busy, most) for one in steps]
    total = sum(busy)
    before = 0.0
    widest = 0.0
    onset: int | None = None
    # each place is tried: the seconds before it against those after it, weighted by how many they are
    for place in range(1, count):
        before += busy[place - 1]
        mean_before = before / place
        mean_after = (total - before) / (count - place)
        contrast = (mean_after - mean_before) * math.sqrt(place * (count - place))
        if contrast > widest:
            widest = contrast
            # the widest contrast decides, also if it is too small to be a beginning
            onset = steps[place].step if mean_after > mean_before * _CLEAR else None
    if onset is not None:
        return onset
    for one in steps:
        if one.busy > slow:
            return one.step
    return steps[0].step


def _has_sync_batchnorm(forward: torch.nn.Module) -> bool:
    return any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in forward.modules())
