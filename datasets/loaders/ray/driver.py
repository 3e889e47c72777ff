"""The process that is connected to Ray: it keeps the workers of one pool alive and gives them tasks.

Ray ends a connected process when the head dies ("The program will terminate") or the token is wrong. So this
process is connected instead of the training. When it ends, Ray ends its workers and frees their objects.
"""

import asyncio
import collections
import io
import os
import select
import socket
import sys
import threading
import time
from types import ModuleType
from typing import Any

from common.exits import import_optional
from datasets.loaders.ray import worker
from datasets.loaders.ray.wire import RAY, Message, pack, read, write

_AT_ONCE = 2  # tasks per worker: one runs, and one waits there
_FATAL = 3  # a task fails after it has ended this number of workers
_REACHED = 5.0  # seconds for the head to accept a connection
_FULL = 15.0  # seconds for workers to start before a full cluster is reported
_SLOW = 120.0  # seconds for the first worker, which may take long to start, or to get a CPU
_AGAIN = 2.0  # seconds until a worker that did not start is tried again
_LONELY = 10.0  # seconds for a replacement if no worker is left


def main(connection: socket.socket) -> None:
    """Serve the pool at the other end of the connection until that end closes.

    Receive a dict of options and the packed function. Send the size of the cluster, or the reason why there
    is none. Then receive ("task", key, lane) with a packed task and ("forget", keys), and send ("done", key)
    with a packed result, ("log", text), ("alone", whether no worker is left) and ("refused", text).
    """
    threading.Thread(target=_end_with, args=(connection.fileno(),), daemon=True).start()
    file = connection.makefile("rwb")
    options, function = read(file)
    sys.path[:] = options["paths"]
    try:
        ray = import_optional("ray", "Ray cannot be imported", RAY)
        host, _, port = options["address"].rpartition(":")
        if host:  # ray.init() would wait, and then end this process
            socket.create_connection((host, int(port)), _REACHED).close()
        node = {"_node_ip_address": options["node"]} if options["node"] else {}
        quiet = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
        ray.init(options["address"], **quiet, **node)
    except Exception as error:
        write(file, _line(error))
    else:
        write(file, None)
        asyncio.run(_Driver(ray, file, options).serve(function))
    os._exit(0)


class _Driver:
    def __init__(self, ray: ModuleType, file: io.BufferedRWPair, options: dict):
        self.ray, self.file, self.paths = ray, file, options["paths"]
        self.workers, self.started = options["workers"], options["started"]
        self.cpus, self.lanes = options["cpus"], options["lanes"]
        self.tasks: dict[tuple, Message] = {}  # until the result is sent, or the task is forgotten
        self.queues: dict = collections.defaultdict(asyncio.PriorityQueue)  # lane -> keys, smallest first
        self.deaths: collections.Counter = collections.Counter()  # workers that a task has ended
        self.ready: set[int] = set()  # the workers that run
        self.served: set[int] = set()  # the workers that have run at any time
        self.alone = False
        self.failure = "no reason is known"

    async def serve(self, function: Message) -> None:
        self.ray.cloudpickle.register_pickle_by_value(worker)
        self.actor = self.ray.remote(worker.Worker).options(num_cpus=self.cpus, scheduling_strategy="SPREAD")
        self.held = [self.ray.put(function)]  # the actors get a reference, and a node stores one copy
        threading.Thread(target=self._listen, args=(asyncio.get_running_loop(),), daemon=True).start()
        await asyncio.gather(self._watch(), *map(self._keep, range(self.started)))

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            (name, *arguments), message = read(self.file)
            loop.call_soon_threadsafe(getattr(self, f"_on_{name}"), message, *arguments)

    def _on_task(self, message: Message, key: tuple, lane: int | None) -> None:
        self.tasks[key] = message
        self.queues[lane].put_nowait(key)

    def _on_forget(self, _: Message, keys: list) -> None:
        for key in keys:
            self.tasks.pop(key, None)

    async def _keep(self, number: int) -> None:
        """Keep a worker running. Its tasks are those of its lane, or of the common queue."""
        queue = self.queues[number if self.lanes else None]
        while True:
            actor = self.actor.remote(self.paths, self.held, number, self.workers)
            given: collections.deque = collections.deque()  # (key, reference to the result)
            try:
                await self._feed(number, actor, queue, given)
            except self.ray.exceptions.RayError as error:
                self.failure = _line(error)
            self.ray.kill(actor)
            if number in self.ready:
                self.ready.remove(number)
                self._send("log", f"ray: worker {number} of {self.workers} was lost")
            else:
                await asyncio.sleep(_AGAIN)
            if given:
                self.deaths[given[0][0]] += 1
            for key, _ in given:
                queue.put_nowait(key)
                if self.deaths[key] == _FATAL:
                    text = f"it ended {_FATAL} workers in a row; the last: {self.failure}"
                    self._finish(key, pack((False, RuntimeError(text))))

    async def _feed(
        self, number: int, actor: Any, queue: asyncio.PriorityQueue, given: collections.deque
    ) -> None:
        """Give tasks to a worker and send its results. Raises RayError if the worker is lost."""
        name = await actor.name.remote()
        self.ready.add(number)
        self.served.add(number)
        if self.alone:
            self.alone = False
            self._send("alone", False)
            self._send("log", f"ray: worker {name} continues")
        while True:
            while len(given) < _AT_ONCE and not (given and queue.empty()):
                key = await queue.get()
                if key in self.tasks:
                    given.append((key, actor.run.remote(self.tasks[key])))
            key, reference = given[0]
            self._finish(key, await reference)
            given.popleft()

    def _finish(self, key: tuple, result: Message) -> None:
        if self.tasks.pop(key, None) is not None:
            write(self.file, ("done", key), result)

    def _send(self, *header: Any) -> None:
        write(self.file, header)

    async def _watch(self) -> None:
        """Report a cluster with too few CPUs, and the loss of all workers."""
        began = seen = time.monotonic()
        total = _cpus(self.ray.cluster_resources())
        too_few = self.cpus > total or (self.lanes and self.cpus * self.started > total)
        if fewer := self.cpus <= total < self.cpus * self.started:
            text = f"{int(total / self.cpus)} of {self.workers} workers run: the cluster has {total:g} CPUs"
            self._send("log", f"ray: {text}, and each takes {self.cpus:g}")
        while True:
            now, missing = time.monotonic(), self.started - len(self.served)
            seen = now if self.ready else seen
            if self.served and not self.alone and now - seen > _LONELY:
                self.alone = True
                self._send(
                    "log",
                    "ray: no worker is left in the Ray cluster: the data are prepared here until one is back",
                )
                self._send("alone", True)
            if missing and (now - began > _FULL or self.cpus > total):
                # CPUs that are not free may be those of workers of this loader that still start.
                free = _cpus(self.ray.available_resources())
                lacking = free < self.cpus and (self.lanes or not self.served)
                if lacking and (too_few or now - began > _SLOW):
                    asked = f"{self.workers} workers of {self.cpus:g} CPU each are needed"
                    room = f"{free:g} of its {_cpus(self.ray.cluster_resources()):g} CPUs are free"
                    cure = "ask for fewer workers, close other loaders, or add nodes"
                    self._send("refused", f"the Ray cluster is full: {asked}, and {room}; {cure}")
                elif not self.served and now - began > _SLOW:
                    self._send("refused", f"no Ray worker has started within {_SLOW:g} s: {self.failure}")
                elif free < self.cpus and not fewer:
                    fewer = True
                    run = f"{self.started - missing} of {self.workers} workers run"
                    self._send("log", f"ray: {run}: {free:g} of the cluster's {total:g} CPUs are free")
            await asyncio.sleep(1)


def _cpus(resources: dict) -> float:
    return resources.get("CPU", 0.0)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _end_with(descriptor: int) -> None:
    """End this process when the other end of the connection closes: Ray's own calls may wait for minutes."""
    poll = select.poll()
    poll.register(descriptor, getattr(select, "POLLRDHUP", 0))  # POLLHUP is always reported
    poll.poll()
    os._exit(0)
