"""A job that continues when processes die, are stopped, are cut off or come: what starts the processes.

Each node has an agent, which is the process that the platform has started. It forks the members of its node
from a process that has PyTorch loaded, keeps one more as a spare, and forks another one for each that dies.
The agent of node 0 also holds the store and decides, from what all agents and processes write there, who the
members are. It holds the output folder too: rank 0, which writes the results, is always a process of node 0.
If node 0 is lost the job ends, and its restart continues from a checkpoint.
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from common.console.arguments import boolean
from common.distributed import entry, launcher, members, preemption, process_group, rendezvous
from common.distributed.members import SILENCE, Plan
from common.ground import accelerator, exits
from common.ground.exits import BadInput, print_line
from common.platform.platforms import HELD, MEMBER, STARTED_BY, available_cores
from common.platform.topology import Topology

OPTION: dict[str, Any] = {
    "type": boolean,
    "default": False,
    "help": "true: a process that dies is replaced, and the others continue (default: false)",
}
_OLDEST = (2, 6)  # release of torch: a fork aborts at its end in 2.1
_POLL = 0.05  # seconds
_SPARES = 2  # of a node: two processes may die at once
_CALM = 1.0  # seconds after a change until a spare is forked: the others begin again meanwhile
_PATIENCE = 1.0  # seconds from a signal to one node until it counts as one for this node only
_DELAY = 0.3  # seconds from a broken group to a new one of the same processes: mostly one of them is dead
_SILENCE_OF_SPARES = 10.0  # seconds: they may wait for the cores
_MOST_DEATHS = 5  # in a row, of processes that did not become members
_MOST_VAIN = 20  # generations in a row in which members were lost in the same step
_ENDS = {exits.BAD_INPUT, exits.NOT_SAVED, exits.DIVERGED, 1}  # exit codes that end the job


def start(topology: Topology, args: argparse.Namespace, hold: Callable[[], object]) -> None:
    """Start the processes of this node, replace those that die, and exit with the code of the job. In a
    process that an agent has started it does nothing.

    args: timeout (seconds to wait for the other nodes) and grace (seconds from a signal to the end).
    hold: makes this process the only one that writes to the output folder. Raises BadInput and NoRendezvous.
    """
    if MEMBER in os.environ:
        return
    for name in ("evaluate", "prof", "sample_losses"):
        if getattr(args, name, None):
            raise BadInput(f"--elastic: expected a training without --{name}")
    if "://" in (args.output_dir or ""):
        raise BadInput(f"--elastic --output_dir {args.output_dir}: expected a folder, not a URL")
    if reason := why_not():
        print_line(f"--elastic: {reason}; a lost process ends the job, which continues when it is restarted")
        return
    if topology.local_rank is not None:
        raise BadInput(
            f"--elastic: {topology.source} has started a process for each rank: start one process for each "
            "node (torchrun --nproc-per-node=1), which starts and replaces the others itself"
        )
    if topology.node_rank == 0:
        hold()
    sys.exit(_Agent(topology, args.timeout, args.grace).run())


def why_not() -> str:
    """Return why processes cannot be replaced here, or ""."""
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    if release < _OLDEST or sys.platform != "linux":
        return f"it needs torch 2.6 on Linux, this is {torch.__version__} on {sys.platform}"
    if accelerator.count():
        return "it was not run on GPUs yet (--enable_gpu=false)"
    return ""


class _Agent:
    def __init__(self, topology: Topology, timeout: float, grace: float):
        self._topology, self._timeout, self._grace = topology, timeout, grace
        self._children: dict[str, Any] = {}  # name -> multiprocessing.Process
        self._asked = 0  # the signal that this agent got
        self._deaths = 0
        # times of time.monotonic(): from when a spare may use the cores (0: there are no members yet), and of
        # SIGKILL to what still runs
        self._spare_at, self._ends_at = 0.0, math.inf
        self._code = 0  # of the job
        self._is_over = False

    def run(self) -> int:
        """Return the exit code of the job on this node."""
        topology = self._topology
        if topology.nodes == 1:
            server, host, port = launcher.hold_store()
        else:
            server = rendezvous.connect(topology, self._timeout, time.monotonic() + self._timeout)
            assert topology.master_host and topology.master_port
            host, port = topology.master_host, topology.master_port
        own = {HELD: "1", STARTED_BY: str(os.getpid()), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        os.environ.update(own)
        process_group.choose_interface(topology, "gloo")  # its processes inherit the choice
        for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
            os.environ.setdefault(name, str(max(1, available_cores() // topology.processes_per_node)))
        self._store = torch.distributed.PrefixStore("members", server)
        roll = None
        if topology.node_rank == 0:
            roll = Roll(self._store, topology.nodes, topology.processes_per_node, self._timeout)
        preemption.forget()
        for number in preemption.SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._forward)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", "common.distributed.preload"])
        self._context = context
        try:
            while not self._is_over or self._children:
                self._fork()
                multiprocessing.connection.wait([each.sentinel for each in self._children.values()], _POLL)
                self._reap()
                self._hear()
                if roll:
                    roll.look(bool(self._asked))
            self._code = self._code or int(_read(self._store, "failed") or 0)  # rank 0, in its last writes
            self._store.set(f"ended/{topology.node_rank}", "")
            if roll:
                roll.wait_for_ends()
        except torch.distributed.DistError as error:
            reason, node = next(iter(str(error).splitlines()), ""), topology.node_rank
            exits.say_error(f"node {node} lost contact with node 0, which has the members: {reason}")
            self._kill()
            return exits.LOST_CONTACT
        return self._code

    def _fork(self) -> None:
        """Fork what is missing: the processes of the node, and a spare."""
        now, count = time.monotonic(), self._topology.processes_per_node
        if not self._spare_at and self._store.check([Plan.key(0)]):
            self._spare_at = now + _CALM
        spares = _SPARES if 0 < self._spare_at < now else 0
        while not self._is_over and not self._asked and len(self._children) < count + spares:
            name = f"{self._topology.node_rank}.{self._store.add('names', 1)}"
            given = {MEMBER: name, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            child = self._context.Process(target=_run, args=(given, entry.main_of_job), name=name)
            child.start()
            self._children[name] = child
            self._store.set(f"pid/{name}", str(child.pid))
            self._store.set(f"ticket/{self._store.add('tickets', 1)}", name)
            self._store.add("news", 1)

    def _reap(self) -> None:
        for name, child in list(self._children.items()):
            if child.exitcode is None:
                continue
            child.join()
            del self._children[name]
            self._judge(name, child.exitcode)

    def _judge(self, name: str, code: int) -> None:
        """Decide what the end of a process means: the end of the job or of its part here, or nothing."""
        was_member = self._store.check([f"member/{name}"])
        self._deaths = 0 if was_member else self._deaths + 1
        self._spare_at = time.monotonic() + _CALM if self._spare_at else 0.0
        reason = f"{signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._store.set(f"gone/{name}", reason)
        self._store.add("news", 1)
        code = 128 - code if code < 0 else code
        if self._is_over:
            # the others are done; only rank 0 may still have something to write
            counts = code in _ENDS or name == _read(self._store, "first")
            self._code = self._code or (code if counts else 0)
        elif code == 0 and self._topology.node_rank == 0:
            self._store.set("done", "")  # a node without members does not see it otherwise
            self._end(0)
        elif code == 0 or self._asked or self._store.check(["stop"]):
            self._end(code)
        elif code in _ENDS or self._deaths >= _MOST_DEATHS:
            if was_member or self._deaths >= _MOST_DEATHS:
                self._store.set("failed", str(code))
            self._end(code)

    def _hear(self) -> None:
        """Notice what other agents have written."""
        if not self._is_over and (failed := _read(self._store, "failed")):
            self._end(int(failed))
        elif not self._is_over and self._store.check(["done"]):
            self._end(0)
        for name, child in self._children.items():  # it was silent, and may be stopped: it must not write
            if self._store.check([f"gone/{name}"]):
                child.kill()
        if time.monotonic() > self._ends_at:
            self._kill()

    def _end(self, code: int) -> None:
        """Let the members end by themselves, after code 0 without a limit: rank 0 may still write. After an
        error, and if they are spares, end them."""
        self._is_over, self._code = True, code
        is_error = code in _ENDS or not (self._asked or code in (0, preemption.exit_code()))
        if code:
            self._limit(launcher.GRACE if is_error else self._grace + launcher.GRACE)
        for name, child in self._children.items():
            if not self._store.check([f"member/{name}"]):
                child.kill()
            elif is_error:
                child.terminate()

    def _limit(self, seconds: float) -> None:
        self._ends_at = min(self._ends_at, time.monotonic() + seconds)

    def _kill(self) -> None:
        for child in self._children.values():
            child.kill()
            child.join()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
        self._limit(self._grace + launcher.GRACE)
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(child.pid, number)


class Roll:
    """The list of members, which the agent of node 0 keeps. per_node: members of a node at most.
    timeout: seconds until the job starts without nodes that did not come."""

    def __init__(self, store: torch.distributed.Store, nodes: int, per_node: int, timeout: float):
        self._store, self._nodes, self._per_node = store, nodes, per_node
        self._plan = Plan(-1, [], [], [], [], 0)
        self._known: dict[str, dict[str, Any]] = {}  # name -> heard (time), beats, ready, rank
        self._facts: dict[str, Any] | None = None  # what the members train
        self._tickets = self._news = 0
        self._looked = self._beats_at = self._asked_at = self._broken_at = 0.0
        self._deadline = time.monotonic() + timeout
        self._began = self._plan  # the last one with which the members have begun
        self._said: list[tuple[int, str]] = []  # numbered reasons of changes that the user was not told
        self._count = 0
        self._lost = 0
        self._step, self._vain = -1, 0  # after which the members have begun, and how often in a row
        self._stops = False

    def look(self, asked: bool) -> None:
        """Read what is new, and publish another plan if the members change. asked: whether node 0 has to
        stop, which ends the job."""
        now = time.monotonic()
        if now - self._looked > SILENCE / 2:  # this process was stopped itself: no process is late
            for each in self._known.values():
                each["heard"] = now
        self._looked = now
        news = self._store.add("news", 0)
        is_due = news != self._news
        self._news = news
        if now - self._beats_at > members.HEARTBEAT:
            self._beats_at = now
            self._listen(now)
            is_due = True
        if is_due:
            self._read_news(now)
            self._publish(now, asked)

    def wait_for_ends(self) -> None:
        """Hold the store until the other agents have ended, at most for some seconds."""
        deadline = time.monotonic() + launcher.GRACE
        ends = [f"ended/{node}" for node in range(self._nodes)]
        while self._nodes > 1 and time.monotonic() < deadline and not self._store.check(ends):
            time.sleep(_POLL)

    def _listen(self, now: float) -> None:
        for name, each in list(self._known.items()):
            beats = self._store.add(f"beat/{name}", 0)
            if beats != each["beats"]:
                each["beats"], each["heard"] = beats, now
                continue
            limit = SILENCE if name in self._plan.ids else _SILENCE_OF_SPARES
            if each["ready"] and now - each["heard"] > limit:
                self._store.set(f"gone/{name}", f"no heartbeat for {limit:g} s")

    def _read_news(self, now: float) -> None:
        while self._tickets < self._store.add("tickets", 0):
            self._tickets += 1
            name = self._store.get(f"ticket/{self._tickets}").decode()
            pid = int(self._store.get(f"pid/{name}"))
            self._known[name] = {"heard": now, "beats": 0, "ready": False, "asked": False, "pid": pid}
        if self._plan is not self._began and self._store.check([f"begun/{self._plan.generation}"]):
            self._note_begin(int(self._store.get(f"begun/{self._plan.generation}")))
        for name, each in list(self._known.items()):
            if reason := _read(self._store, f"gone/{name}"):
                del self._known[name]
                if name in self._plan.ids and reason != "exit code 0" and not each["asked"]:
                    known = name in self._began.ids
                    who = f"rank {self._began.ids.index(name)}" if known else f"new process {name}"
                    self._say(f"{who} on node {node_of(name)} is gone: {reason}")
                    self._lost += 1
                continue
            each["asked"] = each["asked"] or self._store.check([f"asked/{name}"])
            if not each["ready"] and (text := _read(self._store, f"ready/{name}")):
                each["ready"] = self._admit(name, json.loads(text))

    def _note_begin(self, step: int) -> None:
        """Note that the members have begun after `step`. If they do not come further, end the job."""
        told = {number for number, _ in self._plan.said}
        is_vain = step == self._step and self._plan.lost > self._began.lost
        self._vain = self._vain + 1 if is_vain else 0
        self._began, self._step = self._plan, step
        self._said = [each for each in self._said if each[0] not in told]
        if self._vain >= _MOST_VAIN:
            print_line(f"{self._vain} times in a row processes were lost in step {step + 1}: the job ends")
            self._store.set("failed", f"{128 + signal.SIGKILL}")

    def _say(self, reason: str) -> None:
        self._count += 1
        self._said.append((self._count, reason))

    def _admit(self, name: str, facts: dict[str, Any]) -> bool:
        """Return whether a process trains what the members train, and refuse it if not."""
        self._facts = facts if self._facts is None else self._facts
        for key in sorted(facts.keys() | self._facts.keys()):
            here, there = facts.get(key), self._facts.get(key)
            if here != there:
                self._store.set(f"refused/{name}", f"its {key} is {here}, that of the members is {there}")
                print_line(f"process {name} is refused: its {key} is {here}, that of the members is {there}")
                return False
        return True

    def _publish(self, now: float, asked: bool) -> None:
        """Write another plan if the members change, or if a group of them is broken."""
        asks = [name for name in self._plan.ids if self._known.get(name, {}).get("asked")]
        self._asked_at = (self._asked_at or now) if asks else 0.0
        on_first = any(node_of(name) == 0 for name in asks)
        if (asked or on_first or (asks and len(asks) == len(self._plan.ids))) and not self._stops:
            self._stops = True
            numbers = [_read(self._store, f"asked/{name}") for name in asks]
            self._store.set("stop", next(iter(numbers), f"{signal.SIGTERM:d}"))
        leaves = {*asks} if not self._stops and now - self._asked_at > _PATIENCE else set()
        ready = [name for name, each in self._known.items() if each["ready"] and name not in leaves]
        old = [name for name in self._plan.ids if name in ready]
        chosen = old + [name for name in ready if name not in old and not self._stops]
        of_nodes = {node: [name for name in chosen if node_of(name) == node] for node in range(self._nodes)}
        ids = [name for each in of_nodes.values() for name in each[: self._per_node]]
        is_whole = len(ids) == self._nodes * self._per_node or now > self._deadline
        if not self._broken_at and self._store.check([f"broken/{self._plan.generation}"]):
            self._broken_at = now
        is_broken = self._broken_at and now - self._broken_at > _DELAY
        if not of_nodes[0] or (self._plan.generation < 0 and not is_whole):
            return
        if ids == self._plan.ids and not is_broken:
            return
        if any(_read(self._store, f"gone/{name}") == "exit code 0" for name in self._plan.ids):
            if _read(self._store, f"gone/{self._plan.ids[0]}") not in ("", "exit code 0"):
                self._store.set("failed", str(128 + signal.SIGKILL))  # rank 0, in its last writes
            return  # the job is done
        for name in [name for name in self._plan.ids if name in leaves]:
            self._say(f"process {name} leaves, as asked")
        came = [name for name in ids if name not in self._plan.ids]
        if came and self._plan.generation >= 0:
            count, node = f"{len(came)} process{'es' * (len(came) > 1)}", node_of(came[0])
            self._say(f"{count} joined on node {node}")
        nodes = [node_of(name) for name in ids]
        pids = [self._known[name]["pid"] for name in ids]
        self._plan = Plan(self._plan.generation + 1, ids, nodes, pids, [*self._said], self._lost)
        self._broken_at = 0.0
        self._store.set("first", ids[0])
        for name in came:
            self._store.set(f"member/{name}", "")
        self._store.set(Plan.key(self._plan.generation), json.dumps(self._plan))


def node_of(name: str) -> int:
    """Return the node of a process."""
    return int(name.partition(".")[0])


def _read(store: torch.distributed.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _run(variables: dict[str, str], main: str) -> None:
    """Run the job in a fork, as one of its processes."""
    os.environ.update(variables)
    os.environ[STARTED_BY] = str(os.getppid())
    getattr(sys.modules["__main__"], main)()
