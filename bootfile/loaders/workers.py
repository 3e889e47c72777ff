"""The worker processes of torch's DataLoader, and an engine whose batches they make."""

import concurrent.futures
import contextlib
import fcntl
import functools
import gc
import io
import multiprocessing
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from bootfile.ground.errors import BadInput, in_one_line
from bootfile.loaders.loader import Data, Engine, NotDelivered
from bootfile.processes import signals
from bootfile.sampling import generators
from bootfile.sampling.plan import Batch, Plan

# A worker is a process with a thread that sends its results, and one that watches its reads (reading.py).
# The job has a thread for each worker, which sends it the ids of its batches.
_TASKS_OF_WORKER = 4
# what a forked process must not use; files are opened again, see _reopen_files(). SQLite is the first.
_CONNECTIONS = {"sqlite3": "Connection", "lmdb": "Environment", "psycopg": "Connection",
                "psycopg2.extensions": "connection", "duckdb": "DuckDBPyConnection", "zmq": "Socket",
                "grpc": "Channel"}  # fmt: skip
_FILES = (io.FileIO, io.BufferedReader, io.BufferedRandom, io.TextIOWrapper)
_DEPTH = 14  # attributes of attributes that are searched: the pool of a boto3 client is that deep
_SAFE = {"redis", "asyncio", "logging"}  # packages whose objects notice the fork, or which no item reads
_CANNOT_SEND = "a worker of the loader cannot send a batch"
_FEWER = "fewer --workers"
_ALONE = "read without workers (--workers 0)"


class Workers:
    """Worker processes of a DataLoader, kept from epoch to epoch. count: of processes; 0: this process does
    their work. pinned: return batches in pinned memory."""

    def __init__(self, count: int, pinned: bool):
        self.count = count
        self.pinned = pinned
        self._loader: DataLoader[Any] | None = None
        self._plan: Plan | None = None
        self._attributes: Any = None  # those of the function when the workers started
        method = multiprocessing.get_start_method(allow_none=True)
        if method is None:  # asking for the default would set it for the whole job
            method = multiprocessing.get_all_start_methods()[0]
        # by "spawn" and "forkserver" they get a copy of the data set, in which no handle is open
        self.forks = count > 0 and method == "fork"
        # memory that the workers share: see _begin()
        self._closing = multiprocessing.Value("b", 0, lock=False) if count else None
        # A loop may drop the loader without close(): its workers end all the same. At the end of Python,
        # multiprocessing calls its own finalizers before it sends SIGTERM to the workers and waits for them;
        # one of weakref may come after that.
        Finalize(self, _close, args=(self._closing,), exitpriority=1)

    def load(self, plan: Plan, function: Callable[[Batch], Any]) -> Iterator[tuple[Batch, Any]]:
        """Yield (batch, function(batch)) for each batch of a plan. Raises the function's BadInput. The
        workers, and the function that they were started with, are kept as long as the plan is the same
        object, and the loop changes no plain attribute of what the function reads."""
        # without workers nothing is copied
        attributes = function.attributes() if self.count and hasattr(function, "attributes") else None
        if self._loader is None or plan is not self._plan or attributes != self._attributes:
            self._loader = None  # the workers before end here
            self._plan = plan
            self._attributes = attributes
            if self.forks:
                check_tasks(self.count)
            # the workers get a copy of the function now: what it holds must not change in the epoch
            self._loader = self._open(function, plan, self.count, persistent_workers=self.count > 0)
        # the workers are kept: in the second epoch they run already
        batches = self._iterate(self._loader, self.count)
        if self.pinned and not self.count:  # pin_memory=True of torch 2.1 would make lists of nested tuples
            batches = map(_pin, batches)
        for batch, result in batches:
            if isinstance(result, BadInput):
                raise result
            yield batch, result

    def call(self, function: Callable[..., Any], count: int = 1) -> list[Any]:
        """Call function(None) in each of `count` new workers, and return the results. What the function opens
        and keeps open is not open in this process, so the workers of load() will not share it. Without forked
        workers this process calls it once."""
        if not self.forks:
            return [function(None)]
        # they end when this iterator does; the workers of load() are forked later, from this process
        workers = self._open(function, [None] * count, count)  # one "batch" for each worker
        check_tasks(count)
        results = []
        for _, result in self._iterate(workers, count):
            if isinstance(result, BadInput):
                raise result
            results.append(result)
        return results

    def _open(self, function: Any, batches: Any, count: int, **options: Any) -> DataLoader[Any]:
        """Return open_loader() of a function of batches, which are handed to it as they are."""
        options |= {"batch_size": None, "sampler": batches, "collate_fn": _unchanged, "num_workers": count}
        # otherwise a seed is drawn from the job's generator
        return self.open_loader(_Results(function), generator=torch.Generator(), **options)

    def close(self) -> None:
        """End the workers."""
        # first this: until then the workers ignore the SIGTERM that ends them
        _close(self._closing)
        self._loader = None  # its workers end with it
        self._plan = None

    def open_loader(self, results: Dataset[Any], **options: Any) -> DataLoader[Any]:
        """Return a DataLoader whose workers begin with _begin(). They start when it is iterated."""
        if self._closing is not None:
            self._closing.value = 0  # close() may have been called before
            from bootfile.processes.sockets import find_short_folder  # a loop without workers has no sockets

            find_short_folder()
        # the kernel ends a worker with the thread that has forked it, see _begin()
        in_main_thread = threading.current_thread() is threading.main_thread()
        begin = functools.partial(_begin, self._closing, in_main_thread)
        pins = self.pinned and self.count > 0
        return _DataLoader(results, pin_memory=pins, worker_init_fn=begin, **options)

    def _iterate(self, loader: DataLoader[Any], count: int) -> Iterator[Any]:
        """Start `count` workers, and yield what they send. Raises NotDelivered if a limit of processes and
        threads does not allow them."""
        # a collection between fork and _begin() would visit objects whose threads the child does not have
        collects = gc.isenabled()
        gc.disable()
        try:
            try:
                batches = iter(loader)
            finally:
                if collects:
                    gc.enable()
            yield from batches
        except (RuntimeError, OSError) as error:
            from bootfile.machine import process_limits  # only after an error

            line = process_limits.explain(error, f"{count} workers need about {count * _TASKS_OF_WORKER}")
            if not line:
                raise
            self.close()  # the workers that have started end at a SIGTERM
            raise NotDelivered(f"{line}, or use {_FEWER}") from error


class _Iterator(_MultiProcessingDataLoaderIter):
    """torch's iterator of a DataLoader, which ends its workers. If only some of them could be started, torch
    would print a traceback of its own at the end, after the line of Workers._iterate()."""

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            super().__del__()


class _DataLoader(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        """Return the iterator of an epoch."""
        if not self.num_workers:
            return super()._get_iterator()
        self.check_worker_number_rationality()  # a warning of torch
        return _Iterator(self)


class WorkerEngine(Engine):
    """An engine for Loader. workers: a Workers, or an object with its methods. function: called by the
    workers with a batch; it returns the images, uint8 [n, H, W, C]."""

    def __init__(self, workers: Any, function: Callable[[Batch], Any]):
        self._workers = workers
        self._function = function

    def run(self, plan: Plan) -> Data:
        # in the job: the workers have called the function
        for batch, images in self._workers.load(plan, self._function):
            yield batch, torch.as_tensor(images)

    def close(self) -> None:
        self._workers.close()


class _Results(Dataset[Any]):
    """The results of a function of batches. A BadInput is returned, because a raised error would become
    the text of a traceback. refusal: why a worker cannot work."""

    def __init__(self, function: Callable[[Batch], Any]):
        self.function = function
        self.refusal: BadInput | None = None

    def __getitem__(self, batch: Batch) -> tuple[Batch, Any]:
        try:
            # _begin() cannot raise: torch would print a traceback, so each batch tells it
            if self.refusal:
                raise self.refusal
            return batch, self.function(batch)
        except BadInput as error:
            return batch, error
        except Exception as error:
            refusal = not_delivered(error) if get_worker_info() else None
            if refusal is None:
                raise
            return batch, refusal


def _unchanged(value: Any) -> Any:
    return value


def _pin(loaded: tuple[Batch, Any]) -> tuple[Batch, Any]:
    """Return a batch and its result with the result's tensors in pinned memory."""
    batch, result = loaded
    return batch, tree_map_only(torch.Tensor, _pin_tensor, result)


def _pin_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


def _begin(closing: Any, in_main_thread: bool, worker: int) -> None:
    """Prepare a worker. It runs in the worker, after the fork and before the first batch.

    A worker ignores the SIGTERM that a platform sends to all processes of a job: the job makes its step and
    saves a checkpoint after it, and may need batches until then. After close(), the DataLoader sends a
    SIGTERM to a worker that does not end by itself, and the worker obeys that one.

    closing: shared with the job: 1 after close().
    in_main_thread: whether the main thread of the job has started this worker. Then the kernel kills it when
        the job ends, also if its read hangs. The kernel does so when the thread ends that has started the
        worker. If that is another thread, the job may continue, so torch's own check of the parent must do.
    """
    gc.freeze()  # a worker that deletes a pipeline of the job's DALI would wait for its threads for ever
    gc.enable()  # Workers._iterate() has disabled it before the fork
    signals.ignore()
    if in_main_thread:
        signals.die_with_parent(signal.SIGKILL)

    def end_if_closing(number: int, frame: Any) -> None:
        if closing.value:
            os._exit(0)

    # the DataLoader has set a handler of its own after the fork: this one takes its place
    signal.signal(signal.SIGTERM, end_if_closing)
    Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]  # it would only print the error
    try:
        _reopen_files()
    except BadInput as error:
        get_worker_info().dataset.refusal = error  # type: ignore[union-attr]


def _send_error(queue: Any, error: Exception, item: tuple[int, Any]) -> None:
    """Send the error of the thread that sends a worker's results, in place of the result. Otherwise the job
    would wait for it for ever."""
    refusal = not_delivered(error)
    if refusal is None:  # the code of an item is at fault: only the traceback tells where
        traceback.print_exception(error)
        refusal = NotDelivered(f"{_CANNOT_SEND}: {in_one_line(error)}")
    queue.put((item[0], (None, refusal)))


def not_delivered(error: Exception) -> NotDelivered | None:
    """Return the refusal for an error that is due to the limits of the node; None for another error."""
    from bootfile.machine import process_limits  # only after an error

    # neither torch nor the system has classes for these errors: their words decide
    text = str(error)
    reason = process_limits.explain(error)
    if "shared memory" in text:
        line = f"{_CANNOT_SEND}: /dev/shm is full ({error}): give it more (--shm-size), or use {_FEWER}"
    elif "AF_UNIX path too long" in text:
        from bootfile.processes.sockets import explain_long_folder

        line = f"{_CANNOT_SEND}: {explain_long_folder(tempfile.gettempdir())}"
    elif "Too many open files" in text:
        line = f"{_CANNOT_SEND}: {error}: set a higher ulimit -n, or use {_FEWER}"
    elif "in forked subprocess" in text:
        line = f"a worker of the loader cannot use the GPU ({error}): keep the items on the CPU, or {_ALONE}"
    else:
        line = f"in a worker of the loader {reason}, or use {_FEWER}" if reason else ""
    return NotDelivered(line) if line else None


def check_tasks(workers: int, tasks: int = _TASKS_OF_WORKER) -> None:
    """Raise NotDelivered if a limit of processes and threads leaves no room for workers. Each rank calls it
    before it starts them. tasks: processes and threads of a worker."""
    from bootfile.machine import process_limits  # a loop without workers needs no limits

    if line := process_limits.shortage(workers * tasks, f"{workers} workers"):
        raise NotDelivered(f"{line}, or use {_FEWER}")


def _reopen_files() -> None:
    """Open each file again that is open for reading: a forked process shares the position of its parent's
    files, and would get the bytes of another worker's sample. Linux; elsewhere workers are not forked. Raises
    BadInput if a file cannot be opened again."""
    if sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        file = int(name)
        try:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            is_file = stat.S_ISREG(os.fstat(file).st_mode)
            place = os.lseek(file, 0, os.SEEK_CUR)
        except OSError:  # it has no position, or it was that of listdir()
            continue
        # only the position of a file that is read matters, and the three standard streams stay shared
        is_only_written = flags & os.O_ACCMODE == os.O_WRONLY
        if file < 3 or not is_file or is_only_written:
            continue
        path = f"/proc/self/fd/{file}"
        try:
            new = os.open(path, flags & (os.O_ACCMODE | os.O_APPEND))
        except OSError as error:
            raise BadInput(
                f"the open file {os.readlink(path)} cannot be opened again ({error.strerror}), and "
                f"workers would share its position. Open it at the first use in __getitem__, or {_ALONE}"
            ) from error
        # under the old number: the objects of Python that hold it notice nothing
        os.lseek(new, place, os.SEEK_SET)
        os.dup2(new, file, inheritable=False)
        os.close(new)


def check_connections(owners: dict[str, Any]) -> None:
    """Raise BadInput if an object holds a connection, a pipe or threads that forked workers would share or
    lack. owners: name -> object."""
    if connections := generators.search(owners, "", _connection, _DEPTH):
        path, _, kind = connections[0]
        raise BadInput(
            f"{path} is an open {kind}, which workers would share. Open it at the first use in "
            f"__getitem__, or {_ALONE}"
        )


def _connection(value: Any) -> str:
    """Return the kind of an open connection, pipe or pool; "" for another value."""
    kind = f"{type(value).__module__}.{type(value).__name__}"
    if kind.partition(".")[0] in _SAFE:
        raise LookupError("not searched")
    is_open = False
    if isinstance(value, socket.socket):
        value.getpeername()  # OSError if it is not connected
        is_open = True
    elif isinstance(value, _FILES):
        is_open = value.readable() and value.fileno() > 2 and stat.S_ISFIFO(os.fstat(value.fileno()).st_mode)
    elif isinstance(value, concurrent.futures.Executor):
        # it has no threads or processes before its first task
        is_open = bool(getattr(value, "_threads", None) or getattr(value, "_processes", None))
    else:
        # (): the module was not imported
        known = [getattr(sys.modules.get(module), name, ()) for module, name in _CONNECTIONS.items()]
        is_open = any(isinstance(value, each) for each in known)
        if is_open and isinstance(value, known[0]):  # SQLite in memory has no file: the fork has its own
            is_open = any(file for _, _, file in value.execute("pragma database_list"))
    return kind if is_open else ""


def _close(closing: Any) -> None:
    """Let the workers end at a SIGTERM. None: it has none."""
    if closing is not None:
        closing.value = 1
