"""Counters in shared memory, to which a process and its forked or spawned workers add."""

import contextlib
import fcntl
import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Iterator

import numpy as np


class SharedCounts:
    """Numbers by name, from 0. Threads and processes may add at the same time.

    A forked process shares the memory. A pickle contains the id of the process and its file descriptor of the
    memory (Linux's /proc). A worker that unpickles it shares the memory while that process runs; any other
    copy starts at 0.
    """

    def __init__(self, *names: str):
        self._names = names
        self._open(_anonymous(8 * len(names)))

    def add(self, **numbers: int) -> None:
        with self._locked():
            for name, number in numbers.items():
                self._values[self._names.index(name)] += number

    def read(self) -> dict[str, int]:
        with self._locked():
            return dict(zip(self._names, self._values.tolist(), strict=True))

    def __getstate__(self) -> dict:
        descriptor = self._file.fileno()
        identity = _id(os.fstat(descriptor))
        return {"names": self._names, "process": os.getpid(), "file": descriptor, "id": identity}

    def __setstate__(self, state: dict) -> None:
        self._names, descriptor = state["names"], None
        path = f"/proc/{state['process']}/fd/{state['file']}"
        with contextlib.suppress(OSError):
            if _id(os.stat(path)) == state["id"]:  # otherwise that process has ended, and another has its id
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._open(_anonymous(8 * len(self._names)) if descriptor is None else descriptor)

    def _open(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        self._values = np.frombuffer(mmap.mmap(descriptor, 8 * len(self._names)), np.int64)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with _lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX)  # the end of a process releases it
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)


_lock = threading.Lock()


def _renew() -> None:
    """Make a new lock: another thread may have held it when this process was forked."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def _id(status: os.stat_result) -> tuple[str, int, int]:
    return socket.gethostname(), status.st_dev, status.st_ino


def _anonymous(size: int) -> int:
    """Return a file descriptor of `size` bytes of memory, which are freed with the last user."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("counts", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
