"""Run a simulation: start nodes, fire faults, wait until the nodes end.

All of it runs in the one thread of `launch simulate`; each rank of the job is another process. The simulation
sees only the lines that the nodes print, and the processes of this machine.
"""

import contextlib
import math
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterable

from bootfile.console.words import mask_words
from bootfile.ground.exit_codes import TIME_LIMIT, explain_end
from bootfile.processes.sessions import GENERATION
from launch.simulate import slow_data
from launch.simulate.commands import Commands
from launch.simulate.faults import HANGS, Fault
from launch.simulate.nodes import Node, copy_tree

NEVER_FIRED = 3  # exit code: every node ended with 0, but a fault never fired
_STEP = re.compile(r"epoch=\d+ step=(\d+) ")  # the beginning of a job's log line
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
_LAST = int(getattr(signal, "SIGRTMAX", 64))  # macOS has none: the faults never fire
# of the handlers in hanging/sitecustomize.py
_HANG_SIGNALS = {"hang": _LAST - 6, "hold": _LAST - 7}
_RELEASE = _LAST - 8
_POLL = 0.02  # seconds
_GRACE = 5.0  # seconds from SIGTERM to SIGKILL
_LONGEST = 300  # characters of an error that are shown
# `error: ...` of our jobs, `main.py: error: ...` of argparse, the last line of a traceback
_ERROR = re.compile(
    r"(?:\[\w+\]: )?((?:\S+: )?error: \S.*|(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit): \S.*)"
)
_FINE = 0.05  # of a period: how often a throttled process is looked at
_LOOK = 20.0  # seconds until its processes are looked for again
_PERIOD = 0.1  # seconds in which a throttled process runs and stops once: that of a quota of cgroups
_STANDSTILL = 10.0  # seconds that the parent of a stopped process has to end it


def log(line: str) -> None:
    """Print a line of the simulation itself."""
    print(f"[simulate] {line}", flush=True)


def _describe_target(fault: Fault) -> str:
    """Return "rank 1" or "node 0"."""
    if fault.rank is not None:
        return f"rank {fault.rank}"
    return f"node {fault.node}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _send(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes, as far as they still run."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Simulation:
    """A simulation that runs nodes to their end. `launch simulate` makes one and calls run() once.

    processes: of every node. faults: they fire in this order if several are due. limit: seconds, None for no
    limit.
    """

    def __init__(self, processes: int, faults: list[Fault], limit: float | None):
        self._processes = processes
        self._faults = faults
        self._limit = limit
        self._pending = list(faults)  # those that have not fired
        # The step of the job: the last one that any node has printed. Only the node of rank 0 prints steps.
        self._step = 0
        self._members: list[int] = []  # process ids by rank, if the job prints them
        self._random = random.Random(0)  # chooses the ranks of kill:every=...
        self._due: dict[Fault, float] = {}  # time.monotonic() or step of the next kill or pause
        self._ends: dict[Fault, float] = {}  # time.monotonic() of the end of a fault that lasts
        self._targets: dict[Fault, tuple[float, set[int]]] = {}  # when they were looked for, process ids
        self._paused: dict[Fault, set[int]] = {}  # process ids that a pause or a throttle has stopped
        self._hung: dict[Fault, int] = {}  # process ids
        self._interrupts: list[int] = []  # numbers of the signals that the simulation got
        self._stopped: set[int] = set()  # process ids that got SIGSTOP from a fault, and never SIGCONT
        self._stopped_since: float | None = None  # time.monotonic() since which nothing else runs

    def interrupt(self, number: int, frame: object) -> None:
        """Note a signal, on which run() ends all nodes: the handler of SIGINT, SIGTERM and SIGHUP.

        It only notes it, because it runs between any two statements of run().
        """
        self._interrupts.append(number)

    def run(self, nodes: list[Node], commands: Commands) -> int:
        """Make the folders, start the nodes, wait until they end, print a table, and return the exit code.

        `launch simulate` calls it once. On any error all nodes are killed.
        """
        self._nodes = nodes
        self._commands = commands
        for node in nodes:
            node.make_folders()
        self._began = time.monotonic()
        code = None
        try:
            for node in nodes:
                self._start(node)
            while code is None and self._running:
                self._read()
                self._fire_faults()
                self._reap()
                self._kill_if_all_stopped()
                code = self._end_from_outside()
            return self._report(code)
        finally:
            for node in self._running:
                node.kill()

    @property
    def _running(self) -> list[Node]:
        """Return the nodes whose run has begun and was not closed."""
        return [node for node in self._nodes if node.running]

    def _start(self, node: Node) -> None:
        """Start the processes of a node and print their commands: first in run(), later after a fault or a
        failure."""
        processes = self._commands.build(node)
        node.start([(command, environment) for command, environment, _ in processes])
        for (command, _, added), pid in zip(processes, node.pids, strict=True):
            variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(added.items()))
            line = f"node {node.index}: pid={pid} {variables} {shlex.join(mask_words(command)[0])}"
            log(" ".join(line.split()))

    def _read(self) -> None:
        """Wait a moment, and print the new lines of the nodes. Each round of run() begins with it."""
        time.sleep(_PERIOD * _FINE if self._targets else _POLL)
        for node in self._running:
            self._show(node, node.read())

    def _show(self, node: Node, lines: list[str]) -> None:
        """Print lines of a node, and note what they tell: the step, the processes by rank, an error.

        A line may be read long after it was printed: the job may be further than the step here.
        """
        for line in lines:
            print(f"[node {node.index}] {line}")
            step = _STEP.match(line)
            if step:
                self._step = int(step[1])
            generation = GENERATION.fullmatch(line)
            if generation:
                self._members = [*map(int, generation[2].split())]
            error = _ERROR.fullmatch(line)
            if error:
                node.runs[-1].error = error[1][:_LONGEST]
        if lines:
            sys.stdout.flush()

    def _fire_faults(self) -> None:
        """Fire the faults whose step the job has reached. run() calls it in each round, after _read().

        A fault of a node waits for the step of any node, not of that node: only rank 0 prints steps, and the
        ranks of a job do each step together. In a script whose nodes do not wait for each other, a node may
        be hit before its own first step.
        """
        for fault in self._faults:
            if self._step < fault.step:
                continue
            if fault.kind == "pause":
                self._pause(fault)
            elif fault.kind in ("throttle", "slow_data"):
                self._slow_down(fault)
            elif fault.kind in HANGS:
                self._hang_rank(fault)
            elif fault.seconds or fault.steps:
                self._kill_again(fault)
            elif fault not in self._pending:
                continue
            elif fault.rank is not None:
                self._signal_rank(fault, fault.rank)
            else:
                self._start_again(fault)

    def _find_ranks(self) -> dict[int, tuple[Node, int]]:
        """Return global rank -> (node, process id) of the living processes, at the moment of a fault."""
        ranks = {}
        # An elastic job prints its processes, whose ranks may change. Others have theirs in the environment.
        members = {pid: rank for rank, pid in enumerate(self._members)}
        for node in self._running:
            if members:
                node_ranks = {members[pid]: pid for pid in node.find() if pid in members}
            else:
                node_ranks = node.ranks(self._processes)
            for rank, pid in node_ranks.items():
                ranks[rank] = (node, pid)
        return ranks

    def _kill_again(self, fault: Fault) -> None:
        """Kill a random process if it is time. If all are just being replaced, it is done later.

        _fire_faults() calls it in each round from the first step on. Steps count from 0, seconds from the
        first step on.
        """
        if fault.steps:
            position = float(self._step)
            interval = float(fault.steps)
            first = interval
        else:
            position = time.monotonic()
            interval = fault.seconds
            first = position + interval
        if position < self._due.setdefault(fault, first):
            return
        ranks = sorted(self._find_ranks())
        if ranks:
            self._due[fault] = position + interval
            self._signal_rank(fault, self._random.choice(ranks))

    def _pause(self, fault: Fault) -> None:
        """Stop the processes of a fault, or let them continue if it is time.

        _fire_faults() calls it in each round from the fault's step on: the first call stops them, unless
        every=... names a later step.
        """
        if fault in self._ends:
            if time.monotonic() > self._ends[fault]:
                del self._ends[fault]
                self._continue(fault)
                log(f"fault {fault.text}: SIGCONT to {_describe_target(fault)}")
            return
        if fault.steps:
            is_due = self._step >= self._due.setdefault(fault, fault.steps)
        else:
            is_due = fault in self._pending
        pid = self._find_first(fault) if is_due else None
        if pid is None:
            return
        self._due[fault] = self._step + fault.steps
        self._stop(fault, self._find_pids(fault))
        self._stop(fault, self._find_pids(fault))  # again: some may just have forked
        self._ends[fault] = time.monotonic() + fault.seconds
        self._note(fault, f"SIGSTOP to {_describe_target(fault)}", pid)

    def _slow_down(self, fault: Fault) -> None:
        """Begin a fault that makes a rank or a node slow, and end it if it is time.

        _fire_faults() calls it in each round from the fault's step on. A throttled process runs in a part of
        each _PERIOD.
        """
        now = time.monotonic()
        pid = self._find_first(fault) if fault in self._pending else None
        if pid is not None:
            self._ends[fault] = now + (fault.seconds or math.inf)
            if fault.delay:
                for node in self._find_nodes(fault):
                    slow_data.begin(node.folders, fault.rank, fault.delay)
            self._note(fault, f"{fault.kind} of {_describe_target(fault)}", pid)
        if fault not in self._ends:
            return
        if now > self._ends[fault]:
            del self._ends[fault]
            self._targets.pop(fault, None)
            self._continue(fault)
            for node in self._find_nodes(fault):
                slow_data.end(node.folders, fault.rank)
            log(f"fault {fault.text}: the end for {_describe_target(fault)}")
        elif fault.kind == "throttle":
            self._throttle(fault, now)

    def _throttle(self, fault: Fault, now: float) -> None:
        """Let the processes of a fault run in a part of each _PERIOD, and stop them in the rest of it."""
        if now % _PERIOD < _PERIOD * fault.share:
            self._continue(fault)
        elif fault not in self._paused:
            looked, pids = self._targets.get(fault, (-math.inf, set()))
            if now > looked + _LOOK or not all(map(_is_alive, pids)):
                pids = self._find_pids(fault)  # takes longer than a period
                self._targets[fault] = (time.monotonic(), pids)
            self._stop(fault, pids)

    def _find_nodes(self, fault: Fault) -> list[Node]:
        """Return the node of a fault, or all nodes for a fault of a rank."""
        return [node for node in self._nodes if fault.node in (None, node.index)]

    def _find_first(self, fault: Fault) -> int | None:
        """Return the process of the fault's rank, or the first one of its node; None if it does not run."""
        if fault.rank is not None:
            return self._find_ranks().get(fault.rank, (None, None))[1]
        node = self._nodes[fault.node or 0]
        return node.pids[0] if node.running and node.pids else None

    def _find_pids(self, fault: Fault) -> set[int]:
        """Return the process of a fault's rank, or all processes of its node."""
        if fault.rank is not None:
            return {pid for rank, (_, pid) in self._find_ranks().items() if rank == fault.rank}
        return {*self._nodes[fault.node or 0].find()}

    def _stop(self, fault: Fault, pids: set[int]) -> None:
        """Send SIGSTOP to processes for a while, but not to those that another fault has stopped."""
        pids = pids.difference(self._stopped, *self._paused.values())
        self._paused.setdefault(fault, set()).update(pids)
        _send(pids, signal.SIGSTOP)

    def _continue(self, fault: Fault) -> None:
        """Send SIGCONT to the processes that a fault has stopped for a while."""
        _send(self._paused.pop(fault, set()), signal.SIGCONT)

    def _signal_rank(self, fault: Fault, rank: int) -> None:
        """Send the fault's signal to a rank. If the rank is just being replaced, a later round does it."""
        node, pid = self._find_ranks().get(rank, (None, None))
        if node is None or pid is None:
            return
        number = _SIGNALS[fault.kind]
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # it has just ended: the fault may fire in another run
            return
        if number == signal.SIGSTOP:
            self._stopped.add(pid)
        self._note(fault, f"{number.name} to rank {rank} on node {node.index}", pid)

    def _hang_rank(self, fault: Fault) -> None:
        """Make a rank hang, or let it continue if it is time. _fire_faults() calls it in each round from the
        fault's step on."""
        if fault in self._due and time.monotonic() > self._due[fault]:
            self._release(fault)
        if fault not in self._pending:
            return
        node, pid = self._find_ranks().get(fault.rank or 0, (None, None))
        number = _HANG_SIGNALS[fault.kind]
        if node is None or pid is None or not _catches(pid, number):
            return  # a later round does it: the signal would end a process that has no handler yet
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            if fault.seconds:
                self._due[fault] = time.monotonic() + fault.seconds
                self._hung[fault] = pid
            else:
                self._stopped.add(pid)  # it never ends by itself
            self._note(fault, f"rank {fault.rank} on node {node.index} hangs", pid)

    def _release(self, fault: Fault) -> None:
        """Let a rank continue that a fault has made hang."""
        del self._due[fault]
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._hung[fault], _RELEASE)
        log(f"fault {fault.text}: rank {fault.rank} continues")

    def _start_again(self, fault: Fault) -> None:
        """Restart nodes in place, or in new containers with a copy of the outputs of all nodes.

        _fire_faults() calls it once for a fault. The other nodes may fail because of it: each of them is
        restarted once more, see _reap().
        """
        targets = [node for node in self._running if fault.node in (None, node.index)]
        if not targets:
            return
        names = ", ".join(str(node.index) for node in targets)
        self._note(fault, f"SIGKILL to nodes {names}", targets[0].pids[0])
        for node in targets:
            node.kill()
        for node in targets:
            self._finish(node, f"ended by fault {fault.text}")
        if fault.kind == "reschedule":
            with tempfile.TemporaryDirectory(prefix="bootfile-outputs-") as outputs:
                for node in reversed(self._nodes):  # all upload to one place: the files of node 0 win
                    copy_tree(node.output, outputs)
                for node in targets:
                    node.make_folders(outputs)
        for node in targets:
            self._start(node)
        for node in self._nodes:
            if node not in targets:
                node.restarts += 1

    def _note(self, fault: Fault, what: str, pid: int) -> None:
        """Print what a fault has done, and mark the fault as fired. what: "SIGKILL to rank 1 on node 0"."""
        if fault in self._pending:
            self._pending.remove(fault)
        seconds = time.monotonic() - self._began
        log(f"fault {fault.text}: {what} time={seconds:.1f} step={self._step} pid={pid}")

    def _reap(self) -> None:
        """Close the runs that have ended, and restart failed nodes that may be. run() calls it in each round,
        after the faults."""
        for node in self._nodes:
            if node.poll() is None:
                continue
            code = self._finish(node)
            if code and node.restarts:
                node.restarts -= 1
                log(f"node {node.index} ended with {code}: it is restarted in place")
                self._start(node)

    def _finish(self, node: Node, note: str = "") -> int:
        """Print the last lines of a run that has ended, and return its exit code. note: the reason for its
        end, if the simulation caused it."""
        self._show(node, node.close())
        run = node.runs[-1]
        run.note = run.note or note
        return run.code or 0

    def _kill_if_all_stopped(self) -> None:
        """Kill stopped processes if nothing else runs: they never end by themselves.

        run() calls it in each round: without it, a simulation with the fault `stop` would wait forever.
        """
        if not self._are_all_stopped():
            self._stopped_since = None
            return
        now = time.monotonic()
        self._stopped_since = self._stopped_since or now
        for node in self._running:
            if self._stopped.issuperset(node.pids) or now - self._stopped_since > _STANDSTILL:
                node.runs[-1].note = "stopped by a fault, and killed after all others had ended"
                node.kill()

    def _are_all_stopped(self) -> bool:
        """Return whether each running node has ranks, and faults have stopped all of them."""
        if not self._stopped or not self._running:
            return False
        for node in self._running:
            ranks = {*node.ranks(self._processes).values()}
            if not ranks or not ranks <= self._stopped:
                return False
        return True

    def _end_from_outside(self) -> int | None:
        """End the nodes after a signal or at the limit, and return the exit code; else return None.

        run() calls it at the end of each round, and leaves its loop if there is a code.
        """
        seconds = time.monotonic() - self._began
        if self._interrupts:
            number = self._interrupts[0]
            reason = f"{signal.Signals(number).name} to the simulation"
            code = 128 + number
        elif self._limit is not None and seconds > self._limit:
            reason = f"--limit {self._limit:g}"
            code = TIME_LIMIT
        else:
            return None
        log(f"{reason} after {seconds:.1f} s: ending all nodes")
        for fault in [*self._paused]:
            self._continue(fault)  # a stopped process could not save
        for node in self._running:
            node.runs[-1].note = f"ended by {reason}"
            node.restarts = 0  # _reap() must not start it again
            node.end(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        while self._running and time.monotonic() < deadline:
            self._read()
            self._reap()
        for node in self._running:
            node.kill()
            self._finish(node)
        return code

    def _report(self, code: int | None) -> int:
        """Print the table and return the exit code: the last that run() does.

        code: None if the nodes ended by themselves.
        """
        print(f"\n{'node':<16}{'exit code':>9}{'seconds':>10}  explanation")
        for node in self._nodes:
            for number, run in enumerate(node.runs, start=1):
                label = str(node.index)
                if len(node.runs) > 1:
                    label = f"{node.index} run {number}"
                meaning = run.note or explain_end(run.code or 0, run.error)
                print(f"{label:<16}{run.code:>9}{run.ended - run.began:>10.1f}  {meaning}")
        print(flush=True)
        failed = any(run.error for node in self._nodes for run in node.runs)
        if failed and not self._commands.code.is_repository:
            log("guides/own_script.md lists the errors of scripts on platforms, and what to change")
        for fault in self._pending:
            log(f"fault {fault.text} never fired: the last step seen is {self._step}")
        if code is not None:
            return code
        for run in sorted((node.runs[-1] for node in self._nodes), key=lambda run: run.ended):
            if run.code:
                return run.code
        return NEVER_FIRED if self._pending else 0


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
