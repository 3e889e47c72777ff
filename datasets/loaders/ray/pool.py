"""Connect this process to Ray, and run functions on a pool of actors, with the results in order.

Ray restarts an actor whose process or node is lost, and runs its tasks again. If the head is lost, the job
ends with exit code 5 (bootfile/ground/errors.py), and the next start resumes it. A process has one connection
to Ray.
"""

import atexit
import contextlib
import functools
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils._pytree import tree_map_only

from bootfile.ground.errors import BadInput, import_optional, in_one_line, print_line
from bootfile.ground.heartbeat import Heartbeat
from common.ground.endings import LOST_CONTACT
from common.ground.files import ROOT

RAY = '"ray>=2.52"'  # the requirement for pip; 2.52 is the first version with tokens
HELP = "Ray cluster: auto (default: RAY_ADDRESS, or that of this machine, or only this process), or HOST:PORT"

_RETRIES = 20  # starts of a task whose actor is lost: Ray notices a lost node late
_CHECKED = 2.0  # seconds between two checks of the head
_REACHED = 10.0  # seconds for the head to accept a connection
_STARTED = 600.0  # seconds for the actors to get CPUs of a cluster, and to start on busy nodes
_LOOK = 5.0  # seconds between two looks whether they have started
_REPLACED = 60.0  # seconds of waiting for a result until the CPUs of the cluster are counted again

_local = False  # whether Ray was started here, for this process


class ClusterLost(BadInput):
    """The head or too many nodes of the cluster are lost. The job ends, and can be resumed."""

    code = LOST_CONTACT


def connect(address: str, workers: int) -> Any:
    """Connect this process to Ray, if it is not connected. Return the module `ray`.

    address: HOST:PORT of a cluster of which this machine is a node. "auto": RAY_ADDRESS, else the cluster of
        the last `ray start` on this machine, else a new instance on 127.0.0.1 that ends with this process.
    workers: actors for which a new instance starts processes.
    Every rank calls it. Raises BadInput if Ray is missing or the cluster does not answer.
    """
    global _local
    # a notebook or an earlier loader may have connected: a process has one connection
    imported = sys.modules.get("ray")
    if imported and imported.is_initialized():
        return imported
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or _find_started()
    if address and not _is_reached(address):
        raise _no_cluster(address, "it accepts no connection")
    if "ray" not in sys.modules:  # Ray reads its settings when it is imported
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else `uv run` copies the folder
        if address:
            # each try takes 30 s, for example with a wrong token
            os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
        else:
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # listen on 127.0.0.1 only
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = import_optional("ray", "Ray cannot be imported", RAY)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    if not address:
        options |= {"num_cpus": workers, "include_dashboard": False}
        # By default it is 15: where other processes keep the cores busy, the training would wait for minutes.
        os.environ.setdefault("RAY_worker_niceness", "0")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address or "local", **options)
    except Exception as error:
        raise _no_cluster(address, in_one_line(error, 300)) from error
    with contextlib.suppress(ValueError):  # in another thread than the main one
        signal.signal(signal.SIGTERM, handler)  # ray.init() replaces it, and a job saves at this signal
    _local = not address
    return ray


class Worker:
    """An actor that runs functions on tasks, on a node with this project's files at the same path or on the
    PYTHONPATH of `ray start`. paths: this project, then sys.path of the training process. The class is
    pickled by value, and imports this project only after it has set sys.path."""

    def __init__(self, paths: list[str]):
        sys.path.insert(0, paths[0])  # before another package `datasets`
        sys.path.extend(path for path in paths if path not in sys.path)
        import ray
        import torch

        torch.set_num_threads(1)  # as DataLoader's workers do
        self.get: Any = functools.lru_cache(2)(ray.get)  # two iterators of one loader may take turns

    def run(self, held: list, task: tuple) -> Any:
        """Return function(task). held: [reference to the function], which is read once."""
        return self.get(held[0])(task)


class Pool:
    """Actors of Ray that run functions on tasks.

    A function must depend only on its task, because a task runs again if its actor is lost.

    workers: actors. If a cluster has no CPUs for all of them, fewer run.
    address: see connect().
    cpus: CPUs of each actor. In an instance of this process alone actors reserve no CPUs, as DataLoader's.
    `workers`: actors that run. Raises BadInput.
    """

    def __init__(self, workers: int, address: str = "auto", cpus: float = 1.0):
        ray = self._ray = connect(address, workers)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Worker sets the path first
        self._cpus = 0.0 if _local else cpus  # CPUs that each actor reserves
        self._head = ray.get_runtime_context().gcs_address  # HOST:PORT
        self.workers = self._count_possible(workers)
        if not self.workers:
            raise BadInput(f"the Ray cluster has no {cpus:g} CPUs for a worker")
        if self.workers < workers:
            print_line(f"ray: {self.workers} of {workers} workers run: the cluster has no more CPUs")
        options = {"max_restarts": -1, "max_task_retries": _RETRIES, "scheduling_strategy": "SPREAD"}
        actor = ray.remote(Worker).options(num_cpus=self._cpus, **options)
        paths = [ROOT, *(path for path in map(os.path.abspath, sys.path) if path != ROOT)]
        self._actors = [actor.remote(paths) for _ in range(self.workers)]
        self._finalizer = weakref.finalize(self, _kill, ray, self._actors)
        # before Ray's own end, which was registered earlier: with living actors it may end in a segmentation
        # fault (Ray 2.60: 5 of 24 runs)
        atexit.register(self._finalizer)
        if self._cpus:
            self._wait_for_actors()
        self._checked = time.monotonic()  # when the head last accepted a connection

    def _wait_for_actors(self) -> None:
        """Wait until all actors have started. Raises BadInput after _STARTED seconds, because other jobs may
        hold the CPUs of the cluster for ever."""
        calls = [actor.__ray_ready__.remote() for actor in self._actors]
        heartbeat = Heartbeat()
        while True:
            ready, missing = self._ray.wait(calls, num_returns=len(calls), timeout=_LOOK)
            if not missing:
                return
            state = f"{len(ready)} of {self.workers} workers of {self._cpus:g} CPU have started"
            if heartbeat.seconds > _STARTED:
                self.close()
                raise BadInput(
                    f"the Ray cluster is full, or busy: after {_STARTED:g} s {state}; ask for fewer workers"
                )
            heartbeat.beat(f"ray: {state}")

    def put(self, function: Callable[[tuple[int, Any]], Any]) -> list:
        """Store a function for the actors. Return what submit() needs."""
        return [self._ray.put(function)]  # in a list: the actor gets the reference

    def submit(self, function: list, task: tuple[int, Any]) -> Any:
        """Return a reference to function(task). Task (n, content) runs on actor n % workers. The call
        does not wait for it: the loader submits some batches ahead."""
        return self._actors[task[0] % self.workers].run.remote(function, task)

    def take(self, reference: Any, timeout: float = 0.0) -> Any:
        """Wait for a result and return it. Raises the function's exception, ClusterLost, and RuntimeError
        after `timeout` seconds (0: never), or if the task has ended an actor too often."""
        # the arrays of a result are in Ray's object store and read-only; the caller may write to copies
        return tree_map_only(np.ndarray, np.copy, self._take(reference, timeout))

    def _take(self, reference: Any, timeout: float) -> Any:
        """Wait for a result, as take() does, and return it with its read-only arrays. The head is checked
        meanwhile: Ray itself would wait for a lost one without an end."""
        errors = self._ray.exceptions
        begin = time.monotonic()
        try:
            # a wait without an end, in parts: between them a lost head is noticed
            while not self._ray.wait([reference], timeout=min(timeout or _CHECKED, _CHECKED))[0]:
                self._check()
                waited = time.monotonic() - begin
                if timeout and waited > timeout:
                    raise RuntimeError(
                        f"DataLoader timed out after {timeout:g} seconds: no batch from the Ray workers"
                    )
                if waited > _REPLACED and self._count_possible(self.workers) < self.workers:
                    raise ClusterLost(f"the Ray cluster has lost nodes: no CPUs for {self.workers} workers")
            if time.monotonic() - self._checked > _CHECKED:
                self._check()
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            # an error of the data set is the same wherever it is read: one line, without the trace of the
            # actor
            if isinstance(error.cause, BadInput):
                raise error.cause from None
            raise
        except errors.RayActorError as error:
            self._check()
            reason = in_one_line(error, 300)
            raise RuntimeError(f"a batch has ended {_RETRIES + 1} Ray workers: {reason}") from error
        except (OSError, errors.RayError) as error:
            reason = in_one_line(error, 300)
            raise ClusterLost(f"the connection to the Ray cluster is lost: {reason}") from error

    def close(self) -> None:
        """End the actors."""
        self._finalizer()

    def _count_possible(self, workers: int) -> int:
        """Return how many of these actors the CPUs of the cluster allow."""
        if not self._cpus:
            return workers
        cpus = self._ray.cluster_resources().get("CPU", 0.0)
        return min(workers, int(cpus / self._cpus))

    def _check(self) -> None:
        """Raise ClusterLost unless the head accepts connections."""
        if not _is_reached(self._head):
            raise ClusterLost(f"the head of the Ray cluster at {self._head} accepts no connection")
        self._checked = time.monotonic()


def _no_cluster(address: str, reason: str) -> BadInput:
    """Return the error of connect() that names the address, the reason and what to do."""
    if not address:
        return BadInput(f"Ray does not start on this machine: {reason}")
    place = f"{address} (RAY_ADDRESS)" if address == os.environ.get("RAY_ADDRESS") else address
    cure = f"run `ray start --head` there and `ray start --address={address}` on this machine"
    return BadInput(f"no Ray cluster at {place}: {reason}; {cure}, or use --ray_address auto")


def _find_started() -> str:
    """Return the address of the cluster of the last `ray start` on this machine; "" if none answers."""
    path = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", "ray_current_cluster")
    address = path.read_text().strip() if path.exists() else ""
    return address if _is_reached(address) else ""


def _is_reached(address: str) -> bool:
    """Return whether a process accepts connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACHED).close()
    except (OSError, OverflowError, ValueError):
        return False
    return True


def _kill(ray: Any, actors: list) -> None:
    """Kill the actors. An actor that Ray ends because its handle is deleted may hang in its destructors."""
    for actor in actors:
        with contextlib.suppress(Exception):  # Ray may have ended
            ray.kill(actor)
