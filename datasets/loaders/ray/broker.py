"""The process between a loader and a Ray cluster: it has the actors, gives them work, brings the results.

A process that is connected to Ray is ended by Ray when its node's raylet or the head dies. A training must
not be: so this process is connected, and the training only sees that it has gone. What it owned, Ray ends
with it, whichever way it ended: actors, objects, queues.
"""

import collections
import contextlib
import itertools
import os
import queue
import select
import socket
import sys
import threading
import time

import numpy as np

from common.exits import MissingPackage, import_optional
from datasets.loaders.ray import workers as ray_workers
from datasets.loaders.ray.channel import Channel, mapped
from datasets.loaders.ray.transport import RAY, anonymous, places

_AT_ONCE = 2  # tasks a worker: one that it works on, and one that waits there
_PATIENCE = 15.0  # seconds for the first worker, where the cluster has no room
_SLOW = 120.0  # seconds for the first worker, where it has
_LONELY = 10.0  # seconds for a replacement when no worker is left
_AGAIN = 2.0  # seconds until a worker that did not begin is tried again
_FATAL = 3  # workers that one task may end
_REACHED = 5.0  # seconds for the head to take a connection
_CHECK = 1.0  # seconds between looks at time
_END = 5.0  # seconds to leave Ray in order, once the loader has gone
_PAGE = 1 << 16
_SWITCH = 0.0002  # seconds: its threads only pass things on, and must not wait for each other


class _Handle:
    """One actor. running: keys in the order in which it has them."""

    def __init__(self, number: int, actor):
        self.number, self.actor = number, actor
        self.ready, self.running = False, collections.deque()


class Broker:
    """Serves one loader until its end of the channel closes. options: workers, how many of them are started,
    cpus of each, paths, node."""

    def __init__(self, channel: Channel, options: dict):
        import ray

        self._ray, self._channel, self._options = ray, channel, options
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._handles: dict[int, _Handle] = {}
        self._tasks: dict[tuple, tuple] = {}  # key -> (lane, task), until its result is sent or forgotten
        self._any: list[tuple] = []  # keys that wait for any worker, oldest first
        self._lanes: dict[int, list[tuple]] = collections.defaultdict(list)  # or for this one
        self._ended: collections.Counter = collections.Counter()  # workers that a key has ended
        self._function, self._version = None, 0
        self._slots: dict[int, tuple] = {}  # number -> (memory, whether it is free)
        self._slot_numbers = itertools.count()
        self._began, self._alone_since, self._said_alone = time.monotonic(), time.monotonic(), False
        self._any_ready, self._said_fewer, self._checked_room = False, False, False
        self._later: list[tuple[float, int]] = []  # (when, number) of workers to be started again
        ray.cloudpickle.register_pickle_by_value(ray_workers)
        self._actor = ray.remote(ray_workers.Worker)

    def serve(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        parent = os.getppid()
        for number in range(self._options["started"]):
            self._start(number)
        while True:
            try:
                kind, *event = self._events.get(timeout=_CHECK)
            except queue.Empty:
                if os.getppid() != parent:
                    return
                kind, event = "look", []
            if kind == "closed":
                return
            getattr(self, f"_on_{kind}")(*event)
            self._look()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                message, descriptors = self._channel.receive()
                self._events.put((message[0], *message[1:], *descriptors))
        self._events.put(("closed",))

    # what the loader says

    def _on_function(self, version: int, form: bytes, lengths: list, descriptor: int | None = None) -> None:
        memory = np.frombuffer(mapped(descriptor), np.uint8) if descriptor is not None else None
        buffers = [memory[first:last] for first, last in lengths]
        self._function, self._version = self._ray.put((form, buffers)), version

    def _on_task(self, key: tuple, lane: int | None, task: bytes) -> None:
        self._tasks[key] = lane, task
        (self._any if lane is None else self._lanes[lane]).append(key)
        self._give()

    def _on_forget(self, keys: list) -> None:
        for key in keys:
            self._tasks.pop(key, None)
        self._any = [key for key in self._any if key in self._tasks]
        for lane, waiting in self._lanes.items():
            self._lanes[lane] = [key for key in waiting if key in self._tasks]

    def _on_free(self, numbers: list) -> None:
        for number in numbers:
            self._slots[number] = self._slots[number][0], True

    def _on_look(self) -> None:
        pass

    # what Ray says

    def _on_arrived(self, handle: _Handle, future) -> None:
        if self._handles.get(handle.number) is not handle:
            return
        if future.exception() is not None:
            self._lost(handle, future.exception())
            return
        handle.ready = True
        if not self._any_ready:
            self._any_ready = True
            self._say_fewer()
        if self._said_alone:
            self._said_alone = False
            self._channel.send(("accompanied", f"worker {handle.number} on {future.result()}"))
        self._give()

    def _on_result(self, handle: _Handle, key: tuple, future) -> None:
        if self._handles.get(handle.number) is not handle:
            return  # lost before: what it had was given to others
        error = future.exception()
        if error is not None:
            self._lost(handle, error)
            return
        handle.running.remove(key)
        if key in self._tasks:
            del self._tasks[key]
            self._ended.pop(key, None)
            self._deliver(key, future.result())
        self._give()

    # actors

    def _start(self, number: int) -> None:
        actor = self._actor.options(
            num_cpus=self._options["cpus"], scheduling_strategy="SPREAD", max_restarts=0
        ).remote(self._options["paths"], number, self._options["workers"])
        handle = self._handles[number] = _Handle(number, actor)
        self._hear(actor.here.remote(), "arrived", handle)

    def _hear(self, reference, kind: str, *known) -> None:
        events = self._events
        reference.future().add_done_callback(lambda future: events.put((kind, *known, future)))

    def _lost(self, handle: _Handle, error: BaseException) -> None:
        """Another worker takes its place, and what it had is computed again."""
        with contextlib.suppress(Exception):
            self._ray.kill(handle.actor)
        again = [key for key in handle.running if key in self._tasks]
        if again:
            first = again[0]
            self._ended[first] += 1
            if self._ended[first] >= _FATAL:
                again.remove(first)
                del self._tasks[first]
                text = f"it ended {_FATAL} workers, one after the other; the last: {_line(error)}"
                self._channel.send(("done", first, ("failed", text, None), None, None))
        for key in again:
            lane = self._tasks[key][0]
            waiting = self._any if lane is None else self._lanes[lane]
            waiting.append(key)
            waiting.sort()
        if handle.ready:
            self._channel.send(("say", f"worker {handle.number} of {self._options['workers']} was lost"))
        if handle.ready:
            self._start(handle.number)
        else:  # it did not even begin: not to be tried all the time
            self._later.append((time.monotonic() + _AGAIN, handle.number))
        self._give()

    def _give(self) -> None:
        """Work for those that have too little of it."""
        if self._function is None:
            return
        ready = [handle for handle in self._handles.values() if handle.ready]
        for handle in ready:
            waiting = self._lanes[handle.number]
            while waiting and len(handle.running) < _AT_ONCE:
                self._run(handle, waiting.pop(0))
        while self._any and ready:
            handle = min(ready, key=lambda each: len(each.running))
            if len(handle.running) >= _AT_ONCE:
                return
            self._run(handle, self._any.pop(0))

    def _run(self, handle: _Handle, key: tuple) -> None:
        handle.running.append(key)
        reference = handle.actor.run.remote([self._function], self._version, self._tasks[key][1])
        self._hear(reference, "result", handle, key)

    def _look(self) -> None:
        """Is there anybody? Says so where not, once; before the first worker a full cluster is an error."""
        now = time.monotonic()
        for due in [due for due in self._later if due[0] <= now]:
            self._later.remove(due)
            self._start(due[1])
        if any(handle.ready for handle in self._handles.values()):
            self._alone_since = now
            if now - self._began > _PATIENCE and not self._checked_room:
                self._checked_room = True
                self._check_room()
            return
        if self._any_ready:
            if now - self._alone_since > _LONELY and not self._said_alone:
                self._said_alone = True
                self._channel.send(("alone", "no worker is left in the Ray cluster"))
            return
        waited, wanted = now - self._began, self._options["cpus"]
        if waited < _PATIENCE and wanted <= self._ray.cluster_resources().get("CPU", 0.0):
            return
        free = self._ray.available_resources().get("CPU", 0.0)
        if free < wanted or waited > _SLOW:
            raise Refused(self._full(free) if free < wanted else f"no worker has started within {_SLOW:g} s")

    def _say_fewer(self) -> None:
        """Say so if the cluster has not enough CPUs for all workers at a time."""
        count, each = self._options["started"], self._options["cpus"]
        total = self._ray.cluster_resources().get("CPU", 0.0)
        if total < count * each:
            self._said_fewer = True
            text = f"{int(total / each)} of {count} workers run: the cluster has {total:g} CPUs"
            self._channel.send(("say", f"{text}, and each takes {each:g}"))

    def _check_room(self) -> None:
        """Say so if some workers found no room; an error if tasks wait for one of them."""
        missing = [handle.number for handle in self._handles.values() if not handle.ready]
        free = self._ray.available_resources().get("CPU", 0.0)
        if not missing or free >= self._options["cpus"]:
            return
        if any(self._lanes[number] for number in missing):
            raise Refused(self._full(free))
        count = len(self._handles)
        if not self._said_fewer:
            self._channel.send(("say", f"{count - len(missing)} of {count} workers run: the cluster is full"))

    def _full(self, free: float) -> str:
        count, each = self._options["workers"], self._options["cpus"]
        total = self._ray.cluster_resources().get("CPU", 0.0)
        return (
            f"the Ray cluster is full: {count} workers of {each:g} CPU each were asked for, and {free:g} of "
            f"its {total:g} CPUs are free; ask for fewer workers, close other loaders, or add nodes"
        )

    # results

    def _deliver(self, key: tuple, result: tuple) -> None:
        if result[0] == "failed":
            self._channel.send(("done", key, result, None, None))
            return
        _, form, buffers = result
        where, size = places(buffers)
        if not size:
            self._channel.send(("done", key, ("done", form), where, None))
            return
        number, memory, descriptor = self._memory(size)
        for (first, last), buffer in zip(where, buffers, strict=True):
            memory[first:last] = buffer
        descriptors = [] if descriptor is None else [descriptor]
        self._channel.send(("done", key, ("done", form), where, number), descriptors)
        for each in descriptors:
            os.close(each)

    def _memory(self, size: int) -> tuple:
        """(number, memory, descriptor if it is new) of a slot of at least this size that nobody reads."""
        for number, (memory, free) in self._slots.items():
            if free and size <= len(memory) <= 2 * size + _PAGE:
                self._slots[number] = memory, False
                return number, memory, None
        for number in [number for number, (_, free) in self._slots.items() if free]:
            del self._slots[number]  # of another size: batches have changed
            self._channel.send(("gone", number))
        descriptor = anonymous(-(-size // _PAGE) * _PAGE)
        memory = np.frombuffer(mapped(os.dup(descriptor)), np.uint8)
        number = next(self._slot_numbers)
        self._slots[number] = memory, False
        return number, memory, descriptor


class Refused(Exception):
    """The cluster cannot be used. The message says why."""


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _end_with(descriptor: int) -> None:
    """End this process soon after the other end of the socket: where the head has died, too, Ray's own calls
    to begin and to leave may wait for minutes."""
    poll = select.poll()
    poll.register(descriptor, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
    poll.poll()
    time.sleep(_END)
    os._exit(0)


def main(descriptor: int) -> None:
    """Serve the loader at the other end of this socket."""
    channel = Channel(socket.socket(fileno=descriptor))
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    (options,), _ = channel.receive()
    os.environ.update(options["environment"])
    sys.path[:] = options["paths"]
    sys.setswitchinterval(_SWITCH)
    try:
        ray = import_optional("ray", "Ray cannot be imported", RAY)
        address = options["address"]
        try:
            host, _, port = address.rpartition(":")
            if host:  # Ray itself would wait, and then end this process
                socket.create_connection((host, int(port)), _REACHED).close()
            known = {"_node_ip_address": options["node"]} if options["node"] else {}
            ray.init(address, log_to_driver=False, logging_level="error", configure_logging=False, **known)
        except Exception as error:
            raise Refused(_line(error)) from error
        channel.send(("connected",))
        Broker(channel, options).serve()
    except (Refused, MissingPackage) as error:
        with contextlib.suppress(OSError):
            channel.send(("refused", str(error)))
    except OSError:  # the loader has gone
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            channel.send(("alone", f"the link to Ray failed: {type(error).__name__}: {_line(error)}"))
    channel.close()
    with contextlib.suppress(Exception):
        sys.modules["ray"].shutdown()
    os._exit(0)
