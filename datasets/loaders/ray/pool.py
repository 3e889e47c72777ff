"""Run a function on workers of a Ray cluster, or in this process if no worker is left."""

import collections
import contextlib
import hashlib
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from typing import Any

from torch._utils import ExceptionWrapper

from common.exits import BadInput
from common.files import ROOT
from common.platforms import available_cores
from datasets.loaders.ray import cluster
from datasets.loaders.ray.wire import Message, pack, read, start, stop, unpack, write

_END = 10.0  # seconds for the driver to end
_RAY = {"RAY_gcs_rpc_server_reconnect_timeout_s": "10", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}


class Pool:
    """Workers of a Ray cluster that run function(task). Results come in any order and are taken by key.

    function: an object with begin(worker, workers) and __call__(task). The result must depend only on
        function and task, because a task is computed again if its worker is lost.
    workers: actors, each with `cpus` CPUs.
    address: of the cluster; "auto": RAY_ADDRESS, or the cluster with a node on this machine.
    log: called with one line of text.
    cure: the advice in the error if no cluster is found.
    lanes: tasks name their worker, so all workers must run.
    On a cluster that a loader has started (cluster.OWN) Ray reserves no CPUs, because loaders share the
    cores: each has at most one actor for `cpus` cores. Raises BadInput if Ray or the cluster is missing.
    """

    def __init__(
        self,
        function: Any,
        workers: int,
        address: str = "auto",
        cpus: float = 1.0,
        log: Callable[[str], None] | None = None,
        cure: str = cluster.CURE,
        lanes: bool = False,
    ):
        if reason := cluster.unavailable():
            raise BadInput(reason)
        message = pack(function)
        self._function, self._digest, self._workers = function, _digest(message), workers
        self._here: dict = {}  # lane -> the function, in this process
        self._keys = itertools.count()
        address = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
        options: dict[str, Any] = {
            "address": address, "node": os.environ.get(cluster.NODE), "workers": workers, "started": workers,
            "cpus": cpus, "lanes": lanes,
            "paths": [ROOT, *(path for path in map(os.path.abspath, sys.path) if path != ROOT)],
        }  # fmt: skip
        link = self._link = _Link(log or _print)
        if os.environ.get(cluster.OWN) == address and 0 < cpus <= available_cores():
            options["cpus"] = 0.0
            if not lanes:
                options["started"] = min(workers, int(available_cores() / cpus))
        self._finalizer = weakref.finalize(self, link.close)
        self.process = link.process.pid
        found = link.open(options, message)
        if found is not None:
            self._finalizer()
            raise cluster.NoCluster(address, found, cure)
        if options["started"] < workers:
            text = f"{options['started']} of {workers} workers run"
            link.log(f"ray: {text}: this machine has {available_cores()} CPUs")

    def runs(self, function: Any) -> bool:
        """Return whether the workers have the current state of this function."""
        return _digest(pack(function)) == self._digest

    def submit(self, task: Any, lane: int | None = None) -> int:
        """Start a task and return its key. Earlier tasks run first. lane: its worker, None for any."""
        key = next(self._keys)
        self._link.tasks[key] = lane, task
        self._link.send(("task", key, lane), pack(task))
        return key

    def take(self, key: int, timeout: float = 0.0) -> Any:
        """Return the result of a task. Raises the function's exception, BadInput if the cluster is full, and
        RuntimeError after `timeout` seconds (0: never)."""
        result = self._link.wait(key, timeout)
        lane, task = self._link.tasks[key]
        self.forget([key])
        if result is None:
            if lane not in self._here:
                self._here[lane] = unpack(pack(self._function))
                self._here[lane].begin(lane or 0, self._workers)
            return self._here[lane](task)
        done, value = unpack(result)
        if done:
            return value
        if isinstance(value, ExceptionWrapper):
            value.reraise()
        raise value

    def map(self, tasks: Iterable, ahead: int) -> Generator:
        """Yield the results of tasks in order, while `ahead` more tasks run. Raises as take() does."""
        tasks, keys = iter(tasks), collections.deque()
        try:
            while True:
                keys.extend(self.submit(task) for task in itertools.islice(tasks, ahead + 1 - len(keys)))
                if not keys:
                    return
                yield self.take(keys.popleft())
        finally:
            self.forget(keys)

    def forget(self, keys: Iterable[int]) -> None:
        """Drop tasks whose results are not needed."""
        if dropped := [key for key in keys if self._link.drop(key)]:
            self._link.send(("forget", dropped))

    def close(self) -> None:
        """End the workers and the connection to Ray, and wait until the driver has ended."""
        self._finalizer()


class _Link:
    """The connection to the driver. Its reading thread does not refer to the pool, which can be collected."""

    def __init__(self, log: Callable[[str], None]):
        self.log, self.owner = log, os.getpid()
        self.process, self.connection = start("driver", **_RAY)
        self.file = self.connection.makefile("rwb")
        self.changed = threading.Condition()
        self.tasks: dict[int, tuple] = {}  # key -> (lane, task), until it is taken or forgotten
        self.results: dict[int, Message] = {}
        self.alone = self.lost = self.closed = False
        self.refused = ""

    def open(self, options: dict, function: Message) -> str | None:
        """Let the driver connect. Return the reason if there is no cluster."""
        try:
            write(self.file, options, function)
            found, _ = read(self.file)
        except (OSError, EOFError):
            return "it closed the connection: the token is wrong, or the head is down"
        threading.Thread(target=self._follow, daemon=True).start()
        return found

    def send(self, header: tuple, message: Message = (b"", [])) -> None:
        with contextlib.suppress(OSError):  # the thread notices that the driver has ended
            write(self.file, header, message)

    def wait(self, key: int, timeout: float) -> Message | None:
        """Return the result of a task, or None if this process must compute it."""
        with self.changed:

            def is_decided() -> bool:
                return key in self.results or self.alone or self.lost or bool(self.refused)

            if not self.changed.wait_for(is_decided, timeout or None):
                raise RuntimeError(f"no batch from the Ray workers within {timeout:g} seconds")
            if self.refused and key not in self.results:
                raise BadInput(self.refused)
            return self.results.get(key)

    def drop(self, key: int) -> bool:
        """Drop a task. Return whether the driver still has it."""
        with self.changed:
            return self.tasks.pop(key, None) is not None and self.results.pop(key, None) is None

    def close(self) -> None:
        if os.getpid() != self.owner:
            return  # a fork shares the connection
        self.closed = True
        stop(self.process, self.connection, _END)

    def _follow(self) -> None:
        try:
            while True:
                (kind, *values), message = read(self.file)
                with self.changed:
                    if kind == "done" and values[0] in self.tasks:
                        self.results[values[0]] = message
                    elif kind == "log":
                        self.log(*values)
                    elif kind == "alone":
                        self.alone = values[0]
                    elif kind == "refused":
                        self.refused = values[0]
                    self.changed.notify_all()
        except (OSError, EOFError):
            pass
        finally:
            with self.changed:
                self.lost = True
                self.changed.notify_all()
                if not self.closed and not self.alone:
                    self.log("lost the connection to the Ray cluster: the data are prepared here from now on")


def _digest(message: Message) -> bytes:
    form, buffers = message
    digest = hashlib.blake2b(form)
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def _print(line: str) -> None:
    print(line, flush=True)
