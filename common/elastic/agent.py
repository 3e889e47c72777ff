"""A job that continues when processes die, are stopped, are cut off or come: what starts the processes.

Each node has an agent, which is the process that the platform has started. It forks the members of its node
from a process that has PyTorch loaded, keeps two more as spares, and forks another one for each that dies.
The agent of node 0 also holds the store and decides, from what all agents and processes write there, who the
members are. It holds the output folder too: rank 0, which writes the results, is always a process of node 0.
If node 0 is lost the job ends, and its restart continues from a checkpoint.
"""

import argparse
import contextlib
import functools
import inspect
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch

from bootfile.ground import errors
from bootfile.ground.errors import BadInput, print_line
from bootfile.ground.exit_codes import name_signal, normalize
from bootfile.machine.cores import available_cores
from bootfile.processes import signals, sockets
from bootfile.processes.ends import MemoryKills, is_stopped
from bootfile.processes.sessions import why_no_fork
from common.console.arguments import boolean
from common.distributed import entry, launcher, process_group, rendezvous
from common.elastic import crash, members
from common.elastic.members import Plan, announce, announce_failure, read
from common.elastic.roll import HEARTBEAT, SILENCE, Roll
from common.ground import endings
from common.platform.signs import HELD, MEMBER, STARTED_BY
from common.platform.topology import Topology

OPTION: dict[str, Any] = {
    "type": boolean,
    "default": False,
    "help": "true: a process that dies is replaced, and the others continue (default: false)",
}
_POLL = 0.05  # seconds
_SPARES = 2  # processes of a node that wait: two may die at once
# Seconds after a change until a spare is forked. In this time the members begin their next generation: the
# imports and the data set of a new process would take cores from them.
_CALM = 1.0
_PRELOAD = "common.elastic.preload"
_MOST_DEATHS = 5  # in a row, of processes that did not become members
_SERVER_LOST = 255  # multiprocessing's exit code of a process whose fork server has ended
_LONGEST_END = 1.0  # seconds from the last answer of a fork server to its end
_ENDS = {errors.BAD_INPUT, errors.NOT_SAVED, errors.DIVERGED, 1}  # exit codes that end the job


def start(topology: Topology, args: argparse.Namespace, hold: Callable[[], object]) -> None:
    """Start the processes of this node, replace those that die, and exit with the code of the job.

    The job calls it in its main(), in the process that the platform has started on each node. The processes
    that an agent has forked run the same main(): in them it does nothing.

    args: timeout (seconds to wait for the other nodes) and grace (seconds from a signal to the end).
    hold: makes this process the only one that writes to the output folder. Raises BadInput and NoRendezvous.
    """
    if MEMBER in os.environ:
        return
    refused = [name for name in ("evaluate", "prof", "sample_losses") if getattr(args, name, None)]
    if refused:
        raise BadInput(f"--elastic: expected a training without --{refused[0]}")
    if "://" in (args.output_dir or ""):
        raise BadInput(f"--elastic --output_dir {args.output_dir}: expected a folder, not a URL")
    if reason := why_no_fork():
        print_line(f"--elastic: {reason}; a lost process ends the job, which continues when it is restarted")
        return
    if topology.local_rank is not None:
        raise BadInput(
            f"--elastic: {topology.source} has started a process for each rank: start one process for each "
            "node (torchrun --nproc-per-node=1), which starts and replaces the others itself"
        )
    # the members of node 0 change, so the agent holds the output folder for all of them
    if topology.node_rank == 0:
        hold()
    sys.exit(_Agent(topology, args.timeout, args.grace).run())


class _Agent:
    """The agent of a node. All of it runs in the main thread of the process that the platform has started."""

    def __init__(self, topology: Topology, timeout: float, grace: float):
        self._topology = topology
        self._timeout = timeout  # seconds to wait for the other nodes
        self._grace = grace  # seconds from a signal to the end
        self._children: dict[str, Any] = {}  # name -> multiprocessing.Process
        self._stacks: dict[str, Connection] = {}  # name -> the pipe of its faulthandler
        self._stopped: dict[str, float] = {}  # name -> time.monotonic() since when SIGSTOP holds it
        self._kills = MemoryKills()
        self._asked = 0  # the signal that this agent got
        self._deaths: list[str] = []  # why processes ended that did not become members: those in a row
        self._ticks = -1  # the store's counter of changes when this agent last read what has changed
        # in seconds of time.monotonic()
        self._beat_at = 0.0  # when the next heartbeat is due
        self._fork_at = 0.0  # when the next process may be forked
        self._spare_at = math.inf  # when the next spare may be forked; infinite until there are members
        self._ends_at = math.inf  # when what still runs gets SIGKILL; infinite until the job ends
        self._code = 0  # the exit code of the job
        self._is_over = False  # the job ends: nothing is forked any more

    def run(self) -> int:
        """Return the exit code of the job on this node. start() calls it once, and exits with the code.
        Raises BadInput if a limit of processes and threads leaves no room."""
        launcher.check_room(self._topology.processes_per_node)
        server = self._open_store()
        process_group.choose_interface(self._topology, "gloo")  # its processes inherit the choice
        # in the environment of the forks: each has its share of the cores
        for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
            threads = max(1, available_cores() // self._topology.processes_per_node)
            os.environ.setdefault(name, str(threads))
        self._store = torch.distributed.PrefixStore("members", server)
        self._number = self._store.add("agents", 1)
        roll = None
        if self._topology.node_rank == 0:
            roll = Roll(self._store, self._topology.nodes, self._topology.processes_per_node, self._timeout)
        # from here on a signal is for the children: they save, and this process waits for their ends
        signals.forget()
        for number in signals.SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._forward)
        sockets.find_short_folder()
        # the server imports the job and PyTorch once: a new process is there in the time of a fork
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["__main__", _PRELOAD])
        try:
            self._run_until_end(roll)
        except torch.distributed.DistError as error:
            reason = next(iter(str(error).splitlines()), "")
            endings.say_error(
                f"node {self._topology.node_rank} lost contact with node 0, which has the members: {reason}"
            )
            self._kill()
            return endings.LOST_CONTACT
        return self._code

    def _open_store(self) -> torch.distributed.Store:
        """Return the store of the job, and set its address for the forks. The agent of node 0 holds it."""
        topology = self._topology
        if topology.nodes == 1:
            server, host, port = launcher.hold_store()
        else:
            server = rendezvous.connect(topology, self._timeout, time.monotonic() + self._timeout)
            assert topology.master_host and topology.master_port
            host = topology.master_host
            port = topology.master_port
        # the forks inherit it: where the store is, who their parent is, and that the output folder is held
        os.environ[HELD] = "1"
        os.environ[STARTED_BY] = str(os.getpid())
        os.environ["MASTER_ADDR"] = host
        os.environ["MASTER_PORT"] = str(port)
        return server

    def _run_until_end(self, roll: Roll | None) -> None:
        """Do the rounds of this agent, about twenty a second, until the job is over and no child is left.

        roll: on node 0; None on the others.
        """
        while not self._is_over or self._children:
            self._fork_missing()
            sentinels = [child.sentinel for child in self._children.values()]
            multiprocessing.connection.wait(sentinels, _POLL)  # until a child ends
            self._reap()
            if self._asked and not self._is_over and not any(map(self._was_member, self._children)):
                self._end(signals.code_after(self._asked))  # no process of this node has anything to save
            self._beat()
            self._hear()
            if roll:
                roll.look(bool(self._asked))
        if not self._code:
            self._code = int(read(self._store, "failed") or 0)  # rank 0, in its last writes
        if line := read(self._store, "failure"):
            endings.say_error(line)
        # node 0 ends last, as the store ends with it
        self._store.set(f"ended/{self._topology.node_rank}", "")
        if roll:
            roll.wait_for_ends()

    def _fork_missing(self) -> None:
        """Fork what is missing: the processes of the node, and later its two spares. Each round begins with
        it. It forks spares only when the members have begun, and no process has ended on this node for _CALM
        seconds: a fork takes cores, and the members begin again after a loss."""
        now = time.monotonic()
        # no spare before the first generation: the cores load the data of the members
        if self._spare_at == math.inf and self._store.check([Plan.key(0)]):
            self._spare_at = now + _CALM
        count = self._topology.processes_per_node + _SPARES * (now > self._spare_at)
        is_closed = self._is_over or self._asked or now < self._fork_at
        while not is_closed and len(self._children) < count:
            name = f"{self._topology.node_rank}.{self._store.add('names', 1)}"
            try:
                self._fork(name)
            except (OSError, EOFError) as error:  # the fork server has ended meanwhile
                self._deaths.append(errors.in_one_line(error))
                self._end_after_deaths(128 + signal.SIGKILL)
                return  # the next round forks again, from a new server, unless the job has failed

    def _fork(self, name: str) -> None:
        """Fork a process. If the fork server has to start, wait until it has PyTorch loaded."""
        # a process alone, until Members.join() gives it a rank
        variables = {
            MEMBER: name,
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
        with contextlib.ExitStack() as pipe:
            reader, writer = map(pipe.enter_context, self._context.Pipe(duplex=False))
            arguments = (variables, entry.main_of_job, writer)
            child = self._context.Process(target=_run, args=arguments, name=name)
            with _search_path():
                child.start()
            writer.close()
            pipe.pop_all()  # it has started: the reader stays open
        self._children[name] = child
        self._stacks[name] = reader
        # the roll learns from the ticket that the process exists
        ticket = f"ticket/{self._store.add('tickets', 1)}"
        self._store.set(ticket, json.dumps([name, child.pid, self._number]))
        self._store.add("news", 1)

    def _reap(self) -> None:
        """Judge the children that have ended. Each round calls it when a child has ended, or after _POLL."""
        ended = {name: child for name, child in self._children.items() if child.exitcode is not None}
        # a fork server reports the ends of its forks: without it this code comes for all, also if they run. A
        # program may end with this code itself
        if any(child.exitcode == _SERVER_LOST for child in ended.values()) and _has_server_ended():
            lost = [*self._children]
            for name in lost:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._children.pop(name).pid, signal.SIGKILL)
                self._stacks.pop(name).close()
            # together: the next rounds fork as many, from a new server
            ended = {}
            self._fork_at = time.monotonic() + _LONGEST_END
            self._judge(lost, -signal.SIGKILL, "its fork server has ended")
        for name, child in ended.items():
            child.join()
            del self._children[name]
            place = crash.read_place(self._stacks.pop(name))
            code = child.exitcode
            reason = name_signal(-code) if code < 0 else f"exit code {code}"
            lack_of_memory = self._kills.explain() if code == -signal.SIGKILL else ""
            if lack_of_memory:
                reason += lack_of_memory
                self._kills = MemoryKills()  # the next one may have another reason
            if place and crash.is_crash(reason):
                reason = f"{reason} at {place}"
            self._judge([name], code, reason)

    def _judge(self, names: list[str], code: int, reason: str) -> None:
        """Decide what the end of processes means: the end of the job or of its part here, or nothing.

        names: of processes that ended together. code: their exit code, negative after a signal.
        reason: begins with the name of the signal, if they crashed.
        """
        # deaths of members are counted by the roll; here only those of processes that never were one
        was_member = any(map(self._was_member, names))
        if was_member:
            self._deaths.clear()
        else:
            self._deaths.append(reason)
        self._spare_at = max(time.monotonic() + _CALM, self._spare_at)
        for name in names:
            self._store.compare_set(f"gone/{name}", "", reason)  # it may have a reason: it was stopped
        self._store.add("news", 1)
        code = normalize(code)
        if self._is_over:
            # the others are done; only rank 0 may still have something to write
            counts = code in _ENDS or read(self._store, "first") in names
            if counts and not self._code:
                self._code = code
            return
        # a process ends with 0 only after the last step
        if code == 0 and self._topology.node_rank == 0:
            announce(self._store, "done", "")  # a node without members does not see it otherwise
            self._end(0)
            return
        # this end was asked for: its code is that of the node
        if code == 0 or self._asked or self._store.check(["stop"]):
            self._end(code)
            return
        self._end_after_deaths(code)
        if code in _ENDS and not self._is_over:
            if was_member:
                announce(self._store, "failed", str(code))
            self._end(code)
        # else the next round forks another process

    def _was_member(self, name: str) -> bool:
        """Return whether a process is or was a member."""
        return self._store.check([f"member/{name}"])

    def _end_after_deaths(self, code: int) -> None:
        """End the job with this code if too many processes in a row did not become members."""
        node = self._topology.node_rank
        deaths = self._deaths
        crashes = [*itertools.takewhile(crash.is_crash, reversed(deaths))]  # the newest first
        if len(crashes) >= crash.MOST:
            who = f"a new process on node {node}"
            line = crash.describe(who, crashes[0], "before it was a member of the job", len(crashes))
        elif len(deaths) >= _MOST_DEATHS:
            line = (
                f"{len(deaths)} times in a row processes on node {node} ended before they were members of "
                f"the job, the last time with: {deaths[-1]}"
            )
        else:
            return
        announce_failure(self._store, code, line)
        self._end(code)

    def _beat(self) -> None:
        """Send the heartbeat of this node, if it is due. A process that SIGSTOP holds for too long is gone.
        Each round calls it. Without a heartbeat the roll counts all processes of this node as gone."""
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + HEARTBEAT
        self._store.add(f"beat/{self._number}", 1)
        # a process that SIGSTOP holds neither answers nor ends: all others would wait for it
        stopped = [name for name, child in self._children.items() if is_stopped(child.pid)]
        self._stopped = {name: self._stopped.get(name, now) for name in stopped}
        for name, since in self._stopped.items():
            if now - since > SILENCE:
                self._store.set(f"gone/{name}", f"stopped for {SILENCE:g} s")
                self._store.add("news", 1)
                self._children[name].kill()  # it must not write

    def _hear(self) -> None:
        """Read what the roll, other agents and processes have announced. Each round calls it: the counter
        "ticks" in the store tells with one request whether anything is new. If the time of _limit() has
        passed, kill what still runs."""
        if time.monotonic() > self._ends_at:
            self._kill()
        ticks = self._store.add("ticks", 0)
        if ticks == self._ticks:
            return
        self._ticks = ticks
        failed = read(self._store, "failed")
        if not self._is_over and (failed or self._store.check(["done"])):
            self._end(int(failed or 0))
        for name, child in self._children.items():  # this node was silent: they must not write
            if self._store.check([f"gone/{name}"]):
                child.kill()

    def _end(self, code: int) -> None:
        """Begin the end of the job on this node, once; later rounds wait for the children. Members end by
        themselves: after code 0 without a limit, as rank 0 may still write; after an error they get SIGTERM.
        Spares have nothing to save and get SIGKILL. _kill() is the end of what is left."""
        self._is_over = True
        self._code = code
        # no error: the job is done, or a signal stops it, and its members end by themselves
        is_stop = bool(self._asked) or code == 0 or self._store.check(["stop"])
        is_error = code in _ENDS or not is_stop
        if code:
            self._limit(launcher.GRACE if is_error else launcher.GRACE + self._grace)
        for name, child in self._children.items():
            if not self._was_member(name):
                child.kill()
            elif is_error:
                child.terminate()

    def _limit(self, seconds: float) -> None:
        """Let _hear() kill what still runs after `seconds`. An earlier limit stays."""
        self._ends_at = min(self._ends_at, time.monotonic() + seconds)

    def _kill(self) -> None:
        """Kill all children at once, members too: the limit has passed, or contact with node 0 is lost."""
        for child in self._children.values():
            child.kill()
            child.join()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Send a signal to all children: the signal handler of the agent."""
        self._asked = number
        self._limit(self._grace + launcher.GRACE)
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError, TypeError):  # it has ended, or has no pid yet
                os.kill(child.pid, number)


def _has_server_ended() -> bool:
    """Return whether the fork server has ended. Waits for up to _LONGEST_END: the kernel closes its pipes
    first."""
    pid = getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)
    deadline = time.monotonic() + _LONGEST_END
    while pid and time.monotonic() < deadline:
        # it stays a zombie, for ensure_running() of multiprocessing
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
        time.sleep(_POLL / 10)
    return False


@contextlib.contextmanager
def _search_path() -> Iterator[None]:
    """Let a fork server that starts in this block find `common`: it does not run the job's file, which
    extends sys.path."""
    before = os.environ.get("PYTHONPATH")
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, before]))
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _run(variables: dict[str, str], main: str, stacks: Connection) -> None:
    """Run the job as one of its processes: the first function that a fork calls.

    variables: of its environment. main: the name of the job's function. stacks: the pipe for the stacks of a
    crash.
    """
    if preload := sys.modules.get(_PRELOAD):
        preload.reset_signals()
    else:  # python -I: the fork server has not found _PRELOAD, which sets the id of the parent
        os.environ[STARTED_BY] = str(os.getppid())
    os.environ.update(variables)
    crash.report_to(stacks)
    undecorated = inspect.unwrap(getattr(sys.modules["__main__"], main))
    entry.run(functools.partial(members.run, undecorated))
