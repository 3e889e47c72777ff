"""The list of members of a job whose processes may die or come: the agent of node 0 keeps it (agent.py)."""

import json
import math
import signal
import time
from dataclasses import dataclass
from typing import Any

import torch

from bootfile.ground.errors import print_line
from common.distributed import launcher
from common.distributed.barrier import tick
from common.elastic.losses import Losses
from common.elastic.members import Plan, announce, announce_failure, node_of, read

HEARTBEAT = 0.25  # seconds between heartbeats of a node
SILENCE = 2.0  # seconds without a heartbeat after which the processes of a node are gone
_POLL = 0.05  # seconds
_TICK = 10.0  # seconds between ticks of nothing new: networks close connections that are idle
_PATIENCE = 1.0  # seconds from a signal to one node until it counts as one for this node only
_DELAY = 0.3  # seconds from a broken group to a new one of the same processes: mostly one of them is dead


@dataclass
class _Process:
    """What the roll knows of a process that runs."""

    pid: int
    agent: int  # the number of its agent
    is_ready: bool = False  # it can be a member
    was_asked: bool = False  # it got a signal to stop


class Roll:
    """The list of members, which the agent of node 0 keeps. All of it runs in the main thread of that agent.

    per_node: members of a node at most. timeout: seconds until the job starts without nodes that did not
    come.
    """

    def __init__(self, store: torch.distributed.Store, nodes: int, per_node: int, timeout: float):
        self._store = store
        self._nodes = nodes
        self._per_node = per_node
        self._plan = Plan(-1, [], [], [], 0)  # the last one that was published
        self._known: dict[str, _Process] = {}  # name -> process
        self._beats: dict[int, tuple[int, float]] = {}  # agent -> number of its heartbeats, time of the last
        self._facts: dict[str, Any] | None = None  # what the members train
        self._tickets = 0  # numbers of tickets that were given out; each new process has one
        self._open_tickets: list[int] = []  # numbers of tickets that were not written yet
        self._news = 0  # the store's counter of news when it was last read
        # in seconds of time.monotonic()
        self._beats_at = 0.0  # when the heartbeats were last read
        self._ticked_at = 0.0  # the last tick of nothing new
        self._asked_at = math.inf  # since when members of the plan have a signal to stop
        self._broken_at = math.inf  # since when the group of the plan is broken
        self._deadline = time.monotonic() + timeout
        self._began = self._plan  # the last one with which the members have begun
        self._said: list[tuple[int, str]] = []  # numbered reasons of changes that the user was not told
        self._count = 0  # of the reasons so far: the number of the last one
        self._lost = 0  # members that were lost so far
        self._losses = Losses()
        self._stops = False  # the job stops: no process joins any more

    def look(self, asked: bool) -> None:
        """Read what is new, and publish another plan if the members change. The agent of node 0 calls it in
        each of its rounds. asked: whether node 0 has to stop, which ends the job."""
        now = time.monotonic()
        if now - self._ticked_at > _TICK:
            self._ticked_at = now
            tick(self._store)
        # one request in each round; more only if something has changed, or the heartbeats are due
        news = self._store.add("news", 0)
        is_due = news != self._news
        self._news = news
        if now - self._beats_at > HEARTBEAT:
            if now - self._beats_at > SILENCE / 2:  # this process was stopped itself: no heartbeat is late
                self._beats.clear()
            self._beats_at = now
            self._listen(now)
            is_due = True
        if is_due:
            self._read_news()
            self._publish(now, asked)

    def wait_for_ends(self) -> None:
        """Hold the store until the other agents have ended, for some seconds at most. The agent of node 0
        calls it last: the store ends with its process."""
        # a node that is lost writes no end: the wait has a limit
        deadline = time.monotonic() + launcher.GRACE
        ends = [f"ended/{node}" for node in range(self._nodes)]
        while self._nodes > 1 and time.monotonic() < deadline and not self._store.check(ends):
            time.sleep(_POLL)

    def _listen(self, now: float) -> None:
        """Read the heartbeats of the agents: the processes of an agent that has been silent too long are
        gone. The announcement wakes their agent, should it live, which kills them."""
        for agent in {process.agent for process in self._known.values()}:
            beats = self._store.add(f"beat/{agent}", 0)
            before, heard_at = self._beats.get(agent, (-1, now))
            if beats != before:
                self._beats[agent] = beats, now
            elif now - heard_at > SILENCE:
                for name in [name for name, process in self._known.items() if process.agent == agent]:
                    announce(self._store, f"gone/{name}", f"no heartbeat for {SILENCE:g} s")

    def _read_news(self) -> None:
        """Read what agents and processes have written: which processes are new, gone, ready or asked to stop,
        and whether the members have begun. Called when the counter of news, or a heartbeat, is due."""
        while self._tickets < self._store.add("tickets", 0):
            self._tickets += 1
            self._open_tickets.append(self._tickets)
        for number in [*self._open_tickets]:
            text = read(self._store, f"ticket/{number}")
            if text:  # else its agent writes it now, or was killed before it could
                self._open_tickets.remove(number)
                name, pid, agent = json.loads(text)
                self._known[name] = _Process(pid, agent)
        reasons = {name: read(self._store, f"gone/{name}") for name in self._known}
        # The losses are read first: a member writes that its generation has begun, and can be lost after it.
        # In the other order a loss could be seen without its begin, and be counted for the generation before.
        begun = f"begun/{self._plan.generation}"
        if self._plan is not self._began and self._store.check([begun]):
            self._note_begin(int(self._store.get(begun)))
        for name, process in list(self._known.items()):
            if reason := reasons[name]:
                del self._known[name]
                # no loss: a spare, a process that has done its last step, one that leaves
                if name in self._plan.ids and reason != "exit code 0" and not process.was_asked:
                    self._note_loss(name, reason)
                continue
            process.was_asked = process.was_asked or self._store.check([f"asked/{name}"])
            # a process is ready when its main() has loaded the data, alone, up to resume()
            facts = "" if process.is_ready else read(self._store, f"ready/{name}")
            if facts:
                process.is_ready = self._admit(name, json.loads(facts))

    def _note_loss(self, name: str, reason: str) -> None:
        """Note that a member is lost, for the user and for the end after too many losses."""
        began = self._began.ids
        who = f"rank {began.index(name)}" if name in began else f"new process {name}"
        who += f" on node {node_of(name)}"
        self._say(f"{who} is gone: {reason}")
        self._lost += 1
        self._end_after(self._losses.add(who, reason, time.monotonic()))

    def _note_begin(self, step: int) -> None:
        """Note that the members of the plan have begun after `step`. Called once for each generation that
        begins."""
        has_survivors = bool({*self._plan.ids} & {*self._began.ids})
        self._began = self._plan
        # rank 0 of this generation has printed these
        told = {number for number, _ in self._plan.said}
        self._said = [(number, reason) for number, reason in self._said if number not in told]
        self._end_after(self._losses.begin(step, has_survivors))

    def _end_after(self, end: tuple[int, str] | None) -> None:
        """End the job if there were too many losses. end: the exit code and the line of Losses."""
        if end:
            announce_failure(self._store, *end)

    def _say(self, reason: str) -> None:
        """Keep a reason of a change for rank 0, which prints it when the next generation begins."""
        self._count += 1
        self._said.append((self._count, reason))

    def _admit(self, name: str, facts: dict[str, Any]) -> bool:
        """Return whether a process trains what the members train, and refuse it if not. The first process of
        node 0 that is ready decides what that is: others wait for it. Called again at each look until it
        returns True."""
        if self._facts is None and node_of(name) == 0:
            self._facts = facts
        expected = self._facts
        if expected is None:
            return False
        # versions, options and data: with others the states of the two would not be those of one training
        different = [key for key in facts.keys() | expected.keys() if facts.get(key) != expected.get(key)]
        if different and not read(self._store, f"refused/{name}"):  # once: it ends some looks later
            key = min(different)
            reason = f"its {key} is {facts.get(key)}, that of the members is {expected.get(key)}"
            announce(self._store, f"refused/{name}", reason)
            print_line(f"process {name} is refused: {reason}")
        return not different

    def _publish(self, now: float, asked: bool) -> None:
        """Write another plan if the members change, or if a group of them is broken. look() calls it when the
        news were read. asked: as for look()."""
        leaves = self._read_signals(now, asked)
        of_nodes = self._choose(leaves)
        ids = []
        for names in of_nodes.values():
            ids += names[: self._per_node]
        is_whole = len(ids) == self._nodes * self._per_node or now > self._deadline
        # a collective has failed: mostly a member is lost, and its loss makes a plan of others
        if self._store.check([f"broken/{self._plan.generation}"]):
            self._broken_at = min(self._broken_at, now)
        is_broken = now - self._broken_at > _DELAY
        # rank 0 has to be on node 0, and the first generation waits for all
        can_begin = of_nodes[0] and (self._plan.generation >= 0 or is_whole)
        if not can_begin or (ids == self._plan.ids and not is_broken):
            return
        # a member that ended well has done the last step: the others end too, and rank 0 may still write
        if any(read(self._store, f"gone/{name}") == "exit code 0" for name in self._plan.ids):
            end = read(self._store, f"gone/{self._plan.ids[0]}")
            if end not in ("", "exit code 0"):
                line = f"rank 0 ended in its last writes, after the last step ({end}): start the job again"
                announce_failure(self._store, 128 + signal.SIGKILL, line)
            return
        self._write_plan(ids, leaves)

    def _read_signals(self, now: float, asked: bool) -> set[str]:
        """Return the members that leave after a signal of their own. If the whole job stops, announce it, and
        return none. The signals that stop a whole job reach the nodes one after the other. So a member leaves
        only if no other signal makes it a stop of the job within _PATIENCE seconds. asked: as for look()."""
        signalled = [name for name in self._plan.ids if name in self._known and self._known[name].was_asked]
        if not signalled:
            self._asked_at = math.inf
        elif self._asked_at == math.inf:
            self._asked_at = now
        is_on_node_0 = any(node_of(name) == 0 for name in signalled)
        have_all = bool(signalled) and len(signalled) == len(self._plan.ids)
        if (asked or is_on_node_0 or have_all) and not self._stops:
            self._stops = True
            number = read(self._store, f"asked/{signalled[0]}") if signalled else f"{signal.SIGTERM:d}"
            announce(self._store, "stop", number)
        return set() if self._stops or now - self._asked_at <= _PATIENCE else set(signalled)

    def _write_plan(self, ids: list[str], leaves: set[str]) -> None:
        """Publish the next plan, with these members. leaves: members that leave, which the user is told."""
        for name in sorted(leaves, key=self._plan.ids.index):
            self._say(f"process {name} leaves, as asked")
        came = [name for name in ids if name not in self._plan.ids]
        if came and self._plan.generation >= 0:
            processes = f"{len(came)} processes" if len(came) > 1 else "1 process"
            self._say(f"{processes} joined on node {node_of(came[0])}")
        pids = [self._known[name].pid for name in ids]
        self._plan = Plan(self._plan.generation + 1, ids, pids, [*self._said], self._lost)
        self._broken_at = math.inf
        # before the plan: a process that reads the plan, and an agent that judges its end, need these keys
        self._store.set("first", ids[0])
        for name in came:
            self._store.set(f"member/{name}", "")
        announce(self._store, Plan.key(self._plan.generation), json.dumps(self._plan))

    def _choose(self, leaves: set[str]) -> dict[int, list[str]]:
        """Return who may be a member now, by node: the members in their order, then the spares. If the job
        stops, no spare joins. leaves: members that leave."""
        ready = [name for name, process in self._known.items() if process.is_ready and name not in leaves]
        # members keep their order: rank 0 stays rank 0, and a spare comes last
        chosen = [name for name in self._plan.ids if name in ready]
        if not self._stops:
            chosen += [name for name in ready if name not in chosen]
        of_nodes: dict[int, list[str]] = {node: [] for node in range(self._nodes)}
        for name in chosen:
            of_nodes[node_of(name)].append(name)
        return of_nodes
