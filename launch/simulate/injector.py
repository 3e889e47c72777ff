"""Fire the faults of a simulation when the job has reached their step, and end those that last."""

import contextlib
import math
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterable

from bootfile.processes import signals
from launch.simulate.faults import HANGS, Fault
from launch.simulate.job import Job, log
from launch.simulate.nodes import Node, copy_tree

_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
_LAST = int(getattr(signal, "SIGRTMAX", 64))  # macOS has none: the faults never fire
# signals that the handlers in hooks/sitecustomize.py take
_HANG_SIGNALS = {"hang": _LAST - 6, "hold": _LAST - 7}
_RELEASE = _LAST - 8
_RESTART = 10.0  # seconds at most from the end of a node to its next start
_LOOK = 5.0  # seconds until the processes of a throttle are looked for again
_PERIOD = 0.1  # seconds in which a throttled process runs and stops once: that of a quota of cgroups
_STANDSTILL = 10.0  # seconds that the parent of a stopped process has to end it
_ROUND = 0.02  # seconds between two rounds of the simulation
_ROUND_OF_THROTTLE = 0.005  # the same while a process is throttled: 20 rounds in a period


def _count_cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its threads; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return time.clock_gettime(~pid << 3 | 2)  # Linux's number of the clock of a process
    return 0.0


def _send(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes, as far as they still run."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Injector:
    """Fires the faults of a simulation at the processes of a job. The simulation calls it in each round.

    A fault fires once, or again and again if it has every=...; one that lasts is in `_ends` until its end.
    faults: they fire in this order if several are due.
    is_over: whether a signal or the limit ends the simulation: then it waits no more.
    `pending`: the faults that have not fired.
    """

    def __init__(self, job: Job, faults: list[Fault], is_over: Callable[[], bool]):
        self.pending = list(faults)
        self._job = job
        self._faults = faults
        self._is_over = is_over
        self._random = random.Random(0)  # chooses the ranks of kill:every=...
        self._due: dict[Fault, float] = {}  # time.monotonic() or step at which a fault fires again
        self._ends: dict[Fault, float] = {}  # time.monotonic() of the end of a fault that lasts
        self._targets: dict[Fault, tuple[float, set[int]]] = {}  # when they were looked for, process ids
        # of a throttle: when it was counted, the CPU time used by then, the CPU time that is left
        self._quotas: dict[Fault, tuple[float, float, float]] = {}
        self._paused: dict[Fault, set[int]] = {}  # process ids that a pause or a throttle has stopped
        self._stopped: set[int] = set()  # process ids that a fault has stopped for ever
        self._stopped_since: float | None = None  # time.monotonic() since which nothing else runs

    @property
    def round_seconds(self) -> float:
        """Return the seconds that a round of the simulation waits: fewer while a process is throttled."""
        is_throttled = any(fault.kind == "throttle" for fault in self._ends)
        return _ROUND_OF_THROTTLE if is_throttled else _ROUND

    def fire(self) -> None:
        """Fire the faults whose step the job has reached. A fault of a node waits for the step of any node,
        not of that node: only rank 0 prints steps, and the ranks of a job do each step together. In a script
        whose nodes do not wait for each other, a node may be hit before its own first step."""
        for fault in self._faults:
            now = time.monotonic()
            if now > self._ends.get(fault, math.inf):
                self._end(fault)
            elif fault in self._ends:
                if fault.kind == "throttle":
                    self._throttle(fault, now)
            elif self._job.step >= fault.step and self._is_due(fault, now):
                _ACTIONS[fault.kind](self, fault)

    def _is_due(self, fault: Fault, now: float) -> bool:
        """Return whether a fault whose step the job has reached fires now: every N steps, counted from 0,
        every N seconds, counted from the first step on, or once."""
        if fault.steps:
            return self._job.step >= self._due.get(fault, fault.steps)
        if fault.kind == "kill" and fault.seconds:
            return now >= self._due.setdefault(fault, now + fault.seconds)
        return fault in self.pending

    def kill_if_all_stopped(self) -> None:
        """Kill stopped processes if nothing else runs: they never end by themselves."""
        if not self._stopped:
            return
        pids_of_nodes = [{*node.ranks(self._job.processes).values()} for node in self._job.running]
        if not pids_of_nodes or not all(pids and pids <= self._stopped for pids in pids_of_nodes):
            self._stopped_since = None
            return
        now = time.monotonic()
        self._stopped_since = self._stopped_since or now
        for node in self._job.running:
            # a launcher ends its stopped ranks after a while; ranks that the platform has started have none
            if self._stopped.issuperset(node.pids) or now - self._stopped_since > _STANDSTILL:
                node.runs[-1].note = "stopped by a fault, and killed after all others had ended"
                node.kill()

    def continue_all(self) -> None:
        """Continue what faults have stopped for a while: a stopped process could not save."""
        for fault in [*self._paused]:
            self._continue(fault)

    def _signal(self, fault: Fault) -> None:
        """Send the fault's signal to its rank, or to a random one; later, if it is just being replaced."""
        # looked for at each kill: an elastic job has replaced some of them
        ranks = self._job.find_ranks()
        rank = self._random.choice(sorted(ranks)) if fault.rank is None and ranks else fault.rank
        if rank not in ranks:
            return
        node, pid = ranks[rank]
        number = _SIGNALS[fault.kind]
        with contextlib.suppress(ProcessLookupError):  # it has just ended: the fault may fire in another run
            os.kill(pid, number)
            if number == signal.SIGSTOP:  # it stays so: kill_if_all_stopped() has to know it
                self._stopped.add(pid)
            self._note(fault, f"{number.name} to rank {rank} on node {node.index}", pid)

    def _hang(self, fault: Fault) -> None:
        """Make a rank hang, for a time or for ever."""
        node, pid = self._job.find_ranks().get(fault.rank or 0, (None, None))
        number = _HANG_SIGNALS[fault.kind]
        if node is None or pid is None or not signals.catches(pid, number):
            return  # a later round does it: the signal would end a process that has no handler yet
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            self._targets[fault] = (0.0, {pid})
            if not fault.seconds:
                self._stopped.add(pid)  # it never ends by itself
            self._set_end(fault)
            self._note(fault, f"rank {fault.rank} on node {node.index} hangs", pid)

    def _slow_down(self, fault: Fault) -> None:
        """Begin a fault that stops a rank or a node for a time, or makes it slow."""
        pid = self._find_first(fault)
        if pid is None:
            return
        if fault.kind == "pause":
            self._stop(fault, self._find_pids(fault))
            self._stop(fault, self._find_pids(fault))  # again: some may just have forked
        elif fault.kind == "slow_data":
            for node in self._find_nodes(fault):
                node.slow_down(fault.rank, fault.delay)
        self._set_end(fault)
        what = "SIGSTOP to" if fault.kind == "pause" else f"{fault.kind} of"
        self._note(fault, f"{what} {fault.target}", pid)

    def _set_end(self, fault: Fault) -> None:
        """Let a fault that begins now last for its seconds, or without an end."""
        self._ends[fault] = time.monotonic() + (fault.seconds or math.inf)

    def _end(self, fault: Fault) -> None:
        """End a fault that lasts."""
        del self._ends[fault]
        self._continue(fault)
        _, pids = self._targets.pop(fault, (0.0, set()))
        if fault.kind in HANGS:
            _send(pids, _RELEASE)
        elif fault.kind == "slow_data":
            for node in self._find_nodes(fault):
                node.slow_down(fault.rank, 0)
        what = f"SIGCONT to {fault.target}" if fault.kind == "pause" else f"{fault.target} continues"
        log(f"fault {fault.text}: {what}")

    def _throttle(self, fault: Fault, now: float) -> None:
        """Let the processes of a fault use a share of a core, as a quota of cgroups does: they are stopped
        until the time that has passed allows what they have used. Counted is CPU time: on a busy machine this
        process may be late."""
        # to find the processes takes longer than a period: the same ones are used for a while
        found_at, pids = self._targets.get(fault, (-math.inf, set()))
        if now > found_at + _LOOK:
            pids = self._find_pids(fault)
            self._targets[fault] = (time.monotonic(), pids)
            self._quotas.pop(fault, None)
        used = sum(map(_count_cpu_seconds, pids))
        then, used_then, left = self._quotas.get(fault, (now, used, 0.0))
        left = min(left + fault.share * (now - then), fault.share * _PERIOD) - max(0.0, used - used_then)
        self._quotas[fault] = (now, used, left)
        if left > 0:
            self._continue(fault)
        elif fault not in self._paused:
            self._stop(fault, pids)

    def _find_nodes(self, fault: Fault) -> list[Node]:
        """Return the node of a fault, or all nodes for a fault of a rank."""
        return [node for node in self._job.nodes if fault.node in (None, node.index)]

    def _find_first(self, fault: Fault) -> int | None:
        """Return the process of the fault's rank, or the first one of its node; None if it does not run."""
        if fault.rank is not None:
            return self._job.find_ranks().get(fault.rank, (None, None))[1]
        node = self._job.nodes[fault.node or 0]
        return node.pids[0] if node.running and node.pids else None

    def _find_pids(self, fault: Fault) -> set[int]:
        """Return the process of a fault's rank, or all processes of its node."""
        if fault.rank is None:
            return {*self._job.nodes[fault.node or 0].find()}
        pid = self._find_first(fault)
        return set() if pid is None else {pid}

    def _stop(self, fault: Fault, pids: set[int]) -> None:
        """Send SIGSTOP to processes for a while, but not to those that another fault has stopped."""
        pids = pids.difference(self._stopped, *self._paused.values())
        self._paused.setdefault(fault, set()).update(pids)
        _send(pids, signal.SIGSTOP)

    def _continue(self, fault: Fault) -> None:
        """Send SIGCONT to the processes that a fault has stopped for a while."""
        _send(self._paused.pop(fault, set()), signal.SIGCONT)

    def _start_again(self, fault: Fault) -> None:
        """Restart nodes in place, in new containers with a copy of the outputs of all nodes, or as new pods.
        The other nodes may fail because of it: each of them is restarted once more when it has failed."""
        # a node that has ended is not restarted: without another one the fault has not fired
        nodes = [node for node in self._job.running if node.poll() is None]
        targets = [node for node in nodes if fault.node in (None, node.index)]
        if not targets:
            return
        names = ", ".join(str(node.index) for node in targets)
        number = signal.SIGTERM if fault.kind == "evict" else signal.SIGKILL
        self._note(fault, f"{number.name} to nodes {names}", targets[0].pids[0])
        if number == signal.SIGTERM:
            for node in targets:
                _send(node.pids, number)  # to the first process of a pod only
            self._wait_for_end(targets, self._job.commands.pod_grace)
        for node in targets:
            node.kill()
        for node in targets:
            self._job.finish(node, f"ended by fault {fault.text}")
        if fault.kind == "reschedule":
            with tempfile.TemporaryDirectory(prefix="bootfile-outputs-") as outputs:
                for node in reversed(self._job.nodes):  # all upload to one place: the files of node 0 win
                    copy_tree(node.output, outputs)
                for node in targets:
                    node.make_folders(outputs)
        elif fault.kind == "evict":
            for node in targets:
                node.make_folders()
        # a platform takes seconds to start a node: the others have noticed the loss by then, and end, unless
        # the job is elastic. A process that finds its rank in the store of the old job would be refused.
        self._wait_for_end([node for node in self._job.running if node not in targets], _RESTART)
        for node in targets:
            self._job.start(node)
        for node in self._job.nodes:
            if node not in targets:
                node.restarts += 1
                node.is_pod = fault.kind == "evict"

    def _wait_for_end(self, nodes: list[Node], seconds: float) -> None:
        """Wait until the runs of nodes have ended, but not longer than these seconds."""
        deadline = time.monotonic() + seconds
        while any(node.poll() is None for node in nodes) and time.monotonic() < deadline:
            if self._is_over():
                return
            self._job.read()
            time.sleep(self.round_seconds)

    def _note(self, fault: Fault, what: str, pid: int) -> None:
        """Print what a fault has done, and note that it has fired. what: "SIGKILL to rank 1 on node 0"."""
        if fault in self.pending:
            self.pending.remove(fault)
        # when it fires again is counted from now: the job makes no step while it is paused
        self._due[fault] = self._job.step + fault.steps if fault.steps else time.monotonic() + fault.seconds
        log(f"fault {fault.text}: {what} time={self._job.seconds:.1f} step={self._job.step} pid={pid}")


_ACTIONS: dict[str, Callable[[Injector, Fault], None]] = {
    **dict.fromkeys(_SIGNALS, Injector._signal),
    **dict.fromkeys(HANGS, Injector._hang),
    **dict.fromkeys(("pause", "throttle", "slow_data"), Injector._slow_down),
    **dict.fromkeys(("restart", "evict", "reschedule"), Injector._start_again),
}
