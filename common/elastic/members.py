"""A job that continues when processes die, are stopped, are cut off or come: the side of a process.

agent.py starts the processes of a node, and decides who the *members* of the job are. With each change of
them a new *generation* begins. main() runs in a process

    1. alone, up to checkpoint.resume(): packages and data are loaded. Then the process is a spare
    2. as a member. checkpoint.resume() continues from the memory of the member that is furthest
    3. again, in every generation: Changed ends main() inside a collective or after a step, and what the
       process knows of its last step stays in memory

So a change is a restart of main() in processes that stay alive. Nothing is read from the disk for it.
"""

import contextlib
import datetime
import functools
import gc
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bootfile.ground import errors
from bootfile.ground.errors import BadInput
from bootfile.processes import ranks, signals
from common.distributed import barrier
from common.ground import endings
from common.ground.endings import Changed
from common.platform.signs import MEMBER, STARTED_BY

_TIMEOUT = datetime.timedelta(seconds=300)
_FAREWELL = 1.0  # seconds in which a process without a parent reports its end


class Plan(NamedTuple):
    """The members of a generation. ids, pids: names and process ids by rank. said: why it differs from the
    last one that has begun, numbered. lost: processes that were lost so far."""

    generation: int
    ids: list[str]
    pids: list[int]
    said: list[tuple[int, str]]
    lost: int

    @staticmethod
    def key(generation: int) -> str:
        """Return the key in the store at which the roll writes the plan of a generation."""
        return f"plan/{generation}"

    def place(self, name: str) -> dict[str, str]:
        """Return the variables of a launcher for a member, which sets them when it joins. If the nodes have
        different numbers of processes, each process counts as a node."""
        rank = self.ids.index(name)
        nodes = [node_of(member) for member in self.ids]
        node = nodes[rank]
        count = nodes.count(node)
        # a launcher's variables describe only nodes with equal numbers of processes
        is_even = all(nodes.count(other_node) == count for other_node in nodes)
        local_rank = 0
        local_world_size = 1
        if is_even:
            local_rank = rank - nodes.index(node)
            local_world_size = count
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.ids)),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_world_size),
        }


def node_of(name: str) -> int:
    """Return the node of a process."""
    return int(name.partition(".")[0])


def read(store: torch.distributed.Store, key: str) -> str:
    """Return the value of a key; "" without one. Does not wait."""
    return store.get(key).decode() if store.check([key]) else ""


def announce(store: torch.distributed.Store, key: str, value: str) -> None:
    """Write a key that processes or agents wait for, and wake them: they look only after a tick."""
    store.set(key, value)
    barrier.tick(store)


def announce_failure(store: torch.distributed.Store, code: int, line: str) -> None:
    """End the job with an exit code. All agents print the line; if there is one already, they print that."""
    store.compare_set("failure", "", line)
    announce(store, "failed", str(code))


def run(main: Callable[[], object]) -> None:
    """Run the main() of a job, and run it again when the members change. It is all that the main thread of a
    fork does. While main() repeats what was printed before, silence() drops the lines."""
    members = this_process()
    while True:
        try:
            with members.silence():
                main()
            return
        except Changed:  # the process is ready to be a member, or the members change
            pass
        members.leave_group()
        members.join()


@functools.cache
def this_process() -> "Members":
    """Return the Members of this process, which an agent has started; the same in each generation."""
    return Members(os.environ[MEMBER])


def connect() -> torch.distributed.Store:
    """Return a connection of its own to the store that the agent of node 0 holds."""
    store = torch.distributed.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=_TIMEOUT,
    )
    return torch.distributed.PrefixStore("members", store)


class Members:
    """This process among the members of the job. The main thread calls the public methods. A thread
    ("members") follows the store: it sets `due`, and notices lost members and the end of the job."""

    def __init__(self, name: str):
        self.name = name  # unique in the job
        self.is_alone = True  # until this process first joins the members
        self.was_begun = False  # this process has trained before, or has the state of one that has
        self.due = False  # another generation waits for the end of a step, on which all members have to agree
        self.plan = Plan(-1, [], [], [], 0)  # of the present generation
        # returns the state after the last step; None until main() has begun to train in this generation
        self.keep: Callable[[], dict[str, Any]] | None = None
        # the state with which the last generation ended here; None if keep() has a newer one
        self.kept: dict[str, Any] | None = None
        self._store = connect()  # of the main thread
        self._ticks = 0  # number of the last tick for which the main thread has waited
        self._has_lost = threading.Event()  # a member of this generation is gone
        self._lock = threading.Lock()  # plan, due and _has_lost are of one generation
        self._stop = False  # the thread has seen that the whole job stops
        self._number = 0  # the signal that this process got
        self._told = 0  # number of the last reason that this process has told
        self._voice = contextlib.ExitStack()  # holds stdout redirected; closed when the process prints again
        signals.defer(self._note_signal)
        threading.Thread(target=self._listen, name="members", daemon=True).start()

    @property
    def generation(self) -> int:
        """Return the number of the present generation; -1 before this process is a member."""
        return self.plan.generation

    def arrive(self, facts: dict[str, Any]) -> None:
        """Say what this process would train. If it runs alone, main() ends here. Memory.restore() calls it in
        resume(). run() then waits in join() until the process is a member, or is refused because the members
        train something else."""
        if self.is_alone:
            self._store.set(f"ready/{self.name}", json.dumps(facts, sort_keys=True, default=str))
            self._store.add("news", 1)
            raise Changed

    def share(self) -> dict[str, Any] | None:
        """Return on all ranks the state of the member that is furthest; None if there is none.

        Memory.restore() calls it on every rank of a new generation, in the place of a load from a checkpoint.
        """
        step = self.kept["step"] if self.kept else -1
        steps = ranks.gather_objects(step)
        furthest = max(steps)
        if furthest < 0:
            return None
        state = self.kept if step == furthest else None
        # if all are at the same step, each continues from its own state and nothing is sent
        if min(steps) < furthest:
            state = ranks.broadcast_object(state, steps.index(furthest), is_known=state is not None)
        self.kept = state
        self.was_begun = True
        return state

    def check(self) -> None:
        """End main() if a member is lost: the step cannot be finished. The loop asks between its parts."""
        if self._has_lost.is_set():
            raise Changed

    def begin(self, keep: Callable[[], dict[str, Any]]) -> None:
        """Begin to train: from now on keep() has the state. Memory.begin() calls it in each generation."""
        self.keep = keep
        self.kept = None

    def say(self, step: int, say: Callable[[str], object]) -> None:
        """Say what has changed, and that this generation continues after `step`. say: prints on rank 0. Every
        rank calls it when all is restored: it ends silence(), and tells the roll that the generation has
        begun."""
        self._voice.close()
        self.was_begun = True
        plan = self.plan
        count = len(plan.ids)
        # every process counts what was told, as each may be rank 0 of the next generation
        reasons = [reason for number, reason in plan.said if number > self._told]
        self._told = max([number for number, _ in plan.said], default=self._told)
        if reasons:
            they = f"{count} processes continue" if count > 1 else "1 process continues"
            say(f"{'; '.join(reasons)}; {they} at step {step}")
        # the roll reads it: what was lost up to here is replaced
        self._store.set(f"begun/{plan.generation}", str(step))
        say(f"generation {plan.generation + 1}: pids {' '.join(map(str, plan.pids))}")

    def options(self, topology: Any, timeout: float) -> dict[str, Any]:
        """Return the arguments of init_process_group() for this generation. process_group.meet() calls it in
        each member. timeout: seconds of a collective."""
        from common.elastic.group import Group  # only such a job needs it

        Group.gives_up = staticmethod(self._has_lost.is_set)
        Group.failed = staticmethod(self._fail)
        # a prefix for each generation: the keys of a group that broke are still in the store
        store = torch.distributed.PrefixStore(f"group/{self.plan.generation}", connect())
        return {
            "backend": ranks.ELASTIC,
            "store": store,
            "rank": topology.rank,
            "world_size": topology.world_size,
            "timeout": datetime.timedelta(seconds=timeout),
        }

    def leave_group(self) -> None:
        """Close what main() has opened, after it was ended by Changed. The state stays in `kept`."""
        # first, before anything closes: it reads the model, the optimizer and the sums of the last step
        if self.keep:
            self.kept = self.keep()
            self.keep = None
        self._voice.close()
        # closes the log, the loaders and their workers, as at the end of main(), but the process stays
        endings.end(Changed())
        if torch.distributed.is_initialized():
            group: Any = torch.distributed.group.WORLD
            if hasattr(group, "leave"):  # a Group of this room; a process alone may have another one
                group.leave()
            torch.distributed.destroy_process_group()
        # torch counts the groups that it begins to make, and puts the count before their keys. If one could
        # not connect, the count stays, and this process would never meet a new one, which has counted none.
        torch.distributed.distributed_c10d._world.group_count = 0
        self.is_alone = False
        gc.collect()  # the model and the loader of the last generation are in cycles

    def join(self) -> None:
        """Wait until this process is a member, and all others have arrived. run() calls it before main() runs
        again; a spare waits here until a member is lost. Raises BadInput if the process is refused; ends the
        process if it was asked to leave."""
        generation = self.plan.generation + 1  # of the plan that this process looks at
        # the number first, then the look at the keys: a plan that comes between has a later tick
        self._ticks = self._store.add("ticks", 0)
        while True:
            if not self._store.check([Plan.key(generation)]):
                self._wait()
                if reason := read(self._store, f"refused/{self.name}"):
                    raise BadInput(reason)
                continue
            if self._store.check([Plan.key(generation + 1)]):  # only the newest plan counts
                generation += 1
                continue
            plan = Plan(*json.loads(self._store.get(Plan.key(generation))))
            if self.name in plan.ids:
                if self._meet(plan):
                    break
                continue  # there is a newer plan
            if self._number:
                errors.print_line(f"process {self.name} leaves, as asked; the others continue")
                errors.leave(signals.exit_code())
            generation += 1  # this process is a spare in this generation
        with self._lock:
            self.plan = plan
            self.due = False
            self._has_lost.clear()
        self._look(self._store)  # _listen() may have seen a later plan before this one was known
        # as a launcher of processes sets them: main() finds its topology there
        os.environ.update(plan.place(self.name))
        signals.identify(plan.ids.index(self.name), "")
        # the times of the log begin again with this main()
        endings.STARTED = time.monotonic()

    def silence(self) -> contextlib.AbstractContextManager:
        """Drop what main() prints up to say(), if main() has printed it before or will print it again. The
        block is one main(). Only the lines of generation 0 are shown: a process that is alone will run main()
        again as a member, and in later generations the lines were shown before. say() ends it, or the end of
        the block."""
        if self.is_alone or self.plan.generation > 0:
            nothing = self._voice.enter_context(open(os.devnull, "w"))  # noqa: SIM115
            self._voice.enter_context(contextlib.redirect_stdout(nothing))
        return self._voice

    def _meet(self, plan: Plan) -> bool:
        """Wait until all members are in join(), and return True; False if a newer plan comes first."""
        key = f"here/{plan.generation}"
        # the last one that arrives wakes the others, which sleep in the store
        if self._store.add(key, 1) == len(plan.ids):
            barrier.tick(self._store)
        while self._store.add(key, 0) < len(plan.ids):
            # one of them was lost on its way here: the newer plan has the others
            if self._store.check([Plan.key(plan.generation + 1)]):
                return False
            self._wait()
        return True

    def _wait(self) -> None:
        """Wait for the next tick: an announcement of the roll, an agent or a member. join() calls it. If the
        job is done the others do not come, and the process ends."""
        self._ticks += 1
        barrier.wait_for(self._store, f"tick/{self._ticks}", _TIMEOUT.total_seconds())
        if self._store.check(["done"]):
            errors.leave(0)

    def _fail(self, error: RuntimeError) -> None:
        """End main() after an error of a collective: another process is gone. The Group calls it, in the
        thread that waits for the collective. The roll is told: if no process is lost, it makes a new
        generation of the same ones."""
        self._store.set(f"broken/{self.plan.generation}", str(error))
        self._store.add("news", 1)
        raise Changed from None

    def _note_signal(self, number: int) -> None:
        """Report a signal to the roll, which decides whether this process leaves or the job stops. The thread
        of bootfile/processes/signals.py calls it. If the parent has ended, the kernel has sent the signal,
        and the process ends at once: another one may have its place soon."""
        self._number = number
        is_orphan = os.getppid() != int(os.environ[STARTED_BY])
        news = ("gone", "its parent process has ended") if is_orphan else ("asked", str(number))
        thread = threading.Thread(target=self._tell, args=news, daemon=True)  # a request may block
        thread.start()
        if is_orphan:
            thread.join(_FAREWELL)
            errors.leave(endings.LOST_CONTACT)

    def _tell(self, key: str, value: str) -> None:
        """Tell the roll something about this process, once: a thread that _note_signal() starts."""
        with contextlib.suppress(RuntimeError):  # node 0, which has the store, is lost too
            store = connect()  # the main thread may hold the other one, in a wait
            store.compare_set(f"{key}/{self.name}", "", value)
            store.add("news", 1)

    def _listen(self) -> None:
        """Follow the store as long as the process lives: the thread "members"."""
        try:
            self._listen_until_end(connect())
        except RuntimeError as error:
            reason = next(iter(str(error).splitlines()), "")
            endings.say_error(
                f"process {self.name} lost contact with node 0, which has the members: {reason}"
            )
            errors.leave(endings.LOST_CONTACT)

    def _listen_until_end(self, store: torch.distributed.Store) -> None:
        """Look at the store after each tick, for a stop of the whole job and for the next plan."""
        ticks = store.add("ticks", 0)
        while True:
            if not self._stop and store.check(["stop"]):
                self._stop = True
                signals.hear(0, int(store.get("stop")))
            self._look(store)
            ticks += 1
            store.wait([f"tick/{ticks}"], _TIMEOUT)

    def _look(self, store: torch.distributed.Store) -> None:
        """Notice the plan after that of this generation: it is due, and members may be lost. The thread
        "members" calls it after each tick, and the main thread at the end of join()."""
        current = self.plan
        following = Plan.key(current.generation + 1)
        if not self.due and current.ids and store.check([following]):
            plan = Plan(*json.loads(store.get(following)))
            with self._lock:
                if self.plan is current:  # else join() has this plan already, or a later one
                    # a plan that only adds members waits for the end of the step; without a lost one it
                    # cannot end
                    if not {*current.ids} <= {*plan.ids}:
                        self._has_lost.set()
                    self.due = True
