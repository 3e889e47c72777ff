"""A function that runs on the nodes of a Ray cluster, and here when there is none left.

Whoever calls this is not connected to Ray: the process between (ray_broker.py) is, and it may die.
"""

import collections
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import pickle
import random
import socket
import subprocess
import sys
import time
import weakref

import numpy as np
import torch

from common.exits import BadInput
from common.files import ROOT
from common.performance import cores
from datasets.loaders.ray.channel import Channel, mapped
from datasets.loaders.ray.transport import RAY, anonymous, pack_code, places, unpack

_START = "import sys; sys.path.insert(0, {!r}); from datasets.loaders.ray import broker; broker.main({})"
NODE = "BOOTFILE_RAY_NODE"  # environment: the address under which this node has joined, where one is known
OWN = "BOOTFILE_RAY_OWN"  # environment: the address of the cluster that a loader has started on this machine
_END = 10.0  # seconds for the process between to leave the cluster


def available() -> str | None:
    """None, or why Ray cannot be used here."""
    if importlib.util.find_spec("ray") is None:
        return f"Ray is not installed: pip install {RAY}"
    version = importlib.metadata.version("ray")
    if tuple(map(int, version.split(".")[:2])) < (2, 52):
        return f"Ray {version} cannot ask for tokens: pip install {RAY}"
    return None


CURE = "give --ray_address start"


def is_address(text: str) -> bool:
    """Whether it is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and "/" not in host


def no_cluster(address: str, reason: str, cure: str) -> str:
    """The message that no Ray cluster can be used there. cure: what to do, beside `ray start --head`."""
    where = "on this machine" if address == "auto" else f"at {address}"
    if address == os.environ.get("RAY_ADDRESS"):
        where += " (RAY_ADDRESS)"
    return f"no Ray cluster {where}: {brief(reason)}; run `ray start --head` there, or {cure}"


def brief(reason: str) -> str:
    """What Ray says, without its advice: that names options of Ray."""
    return reason.partition(" Please ")[0].rstrip(".")


class Pool:
    """Runs function(task) on workers of a Ray cluster. Results come in any order, and are taken by key.

    function: an object with begin(worker, workers) and __call__(task); all that it needs goes with it. The
    result of a task must follow from the function and the task alone: those of a worker that is lost are
    computed again. workers: actors, each with so many `cpus`. address: of the cluster, "auto": this machine
    is a node of it, or RAY_ADDRESS names it. say: takes a line of text. cure: what to do if there is no
    cluster. start: start(reason, say) is called if "auto" finds none; RAY_ADDRESS names one after it. lanes:
    tasks name their worker, so all must run. On a cluster that is started so (OWN), loaders share the cores:
    each has at most one actor for `cpus` cores, and Ray reserves nothing. Raises BadInput without Ray.
    """

    def __init__(
        self,
        function,
        workers: int,
        address: str = "auto",
        cpus: float = 1.0,
        say=None,
        cure: str = CURE,
        start=None,
        lanes: bool = False,
    ):
        reason = available()
        if reason:
            raise BadInput(reason)
        self.workers, self._given, self._cpus, self._say = workers, address, cpus, say or _print
        self._cure, self._start, self._lanes = cure, start, lanes
        self._tasks: dict[tuple, tuple] = {}  # key -> (lane, task), until it is taken or forgotten
        self._results: dict[tuple, tuple] = {}
        self._maps: dict[int, object] = {}
        self._freed: collections.deque = collections.deque()
        self._connected, self._alone, self._here, self._refused = False, False, {}, None
        self._version, self._digest = 0, None
        self._connect()
        self.replace(function)

    def _connect(self) -> None:
        """Start the process between, which connects to the cluster."""
        auto = self._given == "auto"
        self._address = os.environ.get("RAY_ADDRESS", "auto") if auto else self._given
        started, cpus = self.workers, self._cpus
        if os.environ.get(OWN) == self._address and 0 < cpus <= cores.available():
            if not self._lanes:
                started = min(started, int(cores.available() / cpus))
            cpus = 0.0
        if started < self.workers:
            text = f"{started} of {self.workers} workers run: this machine has {cores.available()} CPUs"
            self._say(f"ray: {text}")
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _START.format(ROOT, theirs.fileno())],
                pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self._channel = Channel(ours)
        self._finalizer = weakref.finalize(self, _end, process, self._channel)
        self.process = process.pid
        paths = [ROOT, *(path for path in map(os.path.abspath, sys.path) if path != ROOT)]
        environment = {"RAY_gcs_rpc_server_reconnect_timeout_s": "10", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
        self._channel.send(({
            "address": self._address, "node": os.environ.get(NODE), "workers": self.workers,
            "started": started, "cpus": cpus, "paths": paths, "environment": environment,
        },))  # fmt: skip

    def replace(self, function) -> bool:
        """From now on this function, if its pickle differs from that of the one before."""
        form, buffers = pack_code(function)
        digest = hashlib.blake2b(form)
        for buffer in buffers:
            digest.update(buffer)
        self._function = function
        if digest.digest() == self._digest:
            return False
        self._digest, self._version = digest.digest(), self._version + 1
        self._here.clear()
        where, size = places(buffers)
        descriptors = []
        if size:
            descriptors.append(anonymous(size))
            memory = np.frombuffer(mapped(os.dup(descriptors[0])), np.uint8)
            for (first, last), buffer in zip(where, buffers, strict=True):
                memory[first:last] = buffer
        self._send("function", self._version, form, where, descriptors=descriptors)
        for each in descriptors:
            os.close(each)
        return True

    def submit(self, key: tuple, task, lane: int | None = None) -> None:
        """Begin a task. Keys are compared: the smallest is worked on first. lane: the worker that is to do
        it, None for any."""
        self._tasks[key] = lane, task
        if self._freed:
            self._send("free", [self._freed.popleft() for _ in range(len(self._freed))])
        self._send("task", key, lane, pickle.dumps(task, 5))

    def take(self, key: tuple, timeout: float = 0.0):
        """The result of a task. Raises what the function raised, BadInput where the cluster cannot be used at
        all, and RuntimeError after so many seconds (0: never)."""
        deadline = time.monotonic() + timeout if timeout else None
        while key not in self._results:
            if self._refused:
                raise BadInput(self._refused)
            if self._channel is None or self._alone:
                if not self._pump(0.0):
                    return self._run_here(key)
                continue
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"no batch from the Ray workers within {timeout:g} seconds")
            self._pump(min(left, 1.0))
        self._tasks.pop(key)
        return _value(*self._results.pop(key))

    def forget(self, keys) -> None:
        keys = [key for key in keys if self._tasks.pop(key, None) is not None]
        for key in keys:
            self._results.pop(key, None)  # its memory is free with it
        if keys:
            self._send("forget", keys)

    def close(self) -> None:
        """End the actors, and wait until the link to Ray has gone."""
        self._finalizer()
        self._channel = None

    def _send(self, *message, descriptors=()) -> None:
        if self._channel is None:
            return
        try:
            self._channel.send(message, descriptors)
        except OSError:
            self._pump(0.0)

    def _pump(self, timeout: float) -> bool:
        """Hear one message, if there is one within so many seconds."""
        if self._channel is None:
            return False
        try:
            heard = self._channel.receive(timeout)
        except EOFError:
            self._channel.close()
            self._channel = None
            if not self._connected:
                self._on_refused("it ended whoever asked: wrong token, or no head")
            elif not self._refused:
                self._say("the link to the Ray cluster was lost: the data are prepared here from now on")
            return False
        if heard:
            (kind, *message), descriptors = heard
            getattr(self, f"_on_{kind}")(*message, *descriptors)
        return heard is not None

    def _on_done(self, key, result, where, number, descriptor=None) -> None:
        if descriptor is not None:
            self._maps[number] = mapped(descriptor)
        buffers = []
        if number is not None:
            memory = np.frombuffer(self._maps[number], np.uint8)
            weakref.finalize(memory, self._freed.append, number).atexit = False
            buffers = [memory[first:last] for first, last in where]
        elif where:
            buffers = [np.empty(0, np.uint8) for _ in where]
        if key in self._tasks:
            self._results[key] = result, buffers

    def _on_gone(self, number: int) -> None:
        del self._maps[number]

    def _on_say(self, text: str) -> None:
        self._say(f"ray: {text}")

    def _on_alone(self, text: str) -> None:
        self._alone = True
        self._say(f"ray: {text}: the data are prepared here meanwhile")

    def _on_accompanied(self, text: str) -> None:
        self._alone = False
        self._say(f"ray: {text} goes on")

    def _on_connected(self) -> None:
        self._connected = True

    def _on_refused(self, text: str) -> None:
        if self._connected:
            self._refused = self._refused or text
        elif self._start and self._address == "auto":
            self._begin_own(text)
        else:
            self._refused = self._refused or no_cluster(self._address, text, self._cure)

    def _begin_own(self, reason: str) -> None:
        """Start a cluster, and give it everything that the one that was not found was asked for."""
        self._finalizer()
        try:
            self._start(reason, self._say)
        except BadInput as error:
            self._refused = str(error)
            return
        self._connect()
        self._digest = None
        self.replace(self._function)
        for key, (lane, task) in sorted(self._tasks.items()):
            self._send("task", key, lane, pickle.dumps(task, 5))

    def _run_here(self, key: tuple):
        lane, task = self._tasks.pop(key)
        self._send("forget", [key])
        place = lane or 0
        if place not in self._here:
            self._here[place] = unpack(*pack_code(self._function))
            self._here[place].begin(place, self.workers)
        with _random_numbers_kept():
            return self._here[place](task)


def _value(result: tuple, buffers: list):
    if result[0] == "done":
        return unpack(result[1], buffers)
    _, text, form = result
    if form is None:
        raise RuntimeError(text)
    error = pickle.loads(form)
    if isinstance(error, BadInput):
        raise error
    raise _as_raised(error, text)


def _as_raised(error: Exception, text: str) -> Exception:
    """An exception of the same kind whose message has the worker's traceback."""
    try:
        told = type(error)(_Text(text))
    except Exception:
        told = RuntimeError(text)
    told.__cause__ = error
    return told


class _Text(str):
    """KeyError shows the repr of its argument: as it is, a traceback would be one line."""

    __repr__ = str.__str__


@contextlib.contextmanager
def _random_numbers_kept():
    """What is drawn inside does not change what is drawn after it."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _print(line: str) -> None:
    print(line, flush=True)


def _end(process: subprocess.Popen, channel: Channel) -> None:
    channel.close()
    try:
        process.wait(_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
