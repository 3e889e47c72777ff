"""What the ranks of a run tell each other while their main threads are blocked: texts in the store.

A call of the store may block for ever, for example when the process that holds it is stopped. So one thread
makes all calls, over a connection of its own, and the caller waits for a limited time.
"""

import datetime
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from bootfile.processes import texts

if TYPE_CHECKING:  # a build of torch may have no torch.distributed
    from torch._C._distributed_c10d import Store

_ANSWER = 3.0  # seconds that a caller waits for an answer
_FAREWELL = 2.0  # seconds for the last call to end
_TIMEOUT = datetime.timedelta(seconds=60)
T = TypeVar("T")


class Board:
    """Texts that all ranks read and write. One thread of each rank calls the methods, and any at the end.

    store: of the default group. name: the same on all ranks, and unique: a restart may find the same store.
    `lost`: why the store has closed the connection; "" before.
    """

    def __init__(self, store: "Store", name: str):
        self.lost = ""
        self._store = store
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[Any], object] | None] = queue.SimpleQueue()
        self._is_busy = threading.Event()  # a call has no answer yet
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="board", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Any], T], seconds: float = _ANSWER) -> T | None:
        """Return function(store); None if the store does not answer within `seconds`. While it does not
        answer, later calls return at once."""
        with self._lock:
            if self.lost or self._is_busy.is_set():
                return None
            self._is_busy.set()
            # filled by the thread, perhaps only after this call has given up
            answer: list[T] = []
            done = threading.Event()

            def ask(store: Any) -> None:
                answer.append(function(store))
                done.set()

            self._tasks.put(ask)
            deadline = time.monotonic() + seconds
            # in short waits: if the thread ends with an error, `done` is never set
            while not done.wait(0.05):
                if self.lost or time.monotonic() > deadline:
                    return None
        return answer[0]

    def read(self, *keys: str) -> list[str] | None:
        """Return texts; "" for a key without one. None without an answer."""

        def read_all(store: Any) -> list[str]:
            return [texts.read(store, key) for key in keys]

        return self.call(read_all)

    def write(self, key: str, text: str) -> None:
        """Write a text."""

        def write(store: Any) -> None:
            texts.write(store, key, text)

        self.call(write)

    def write_first(self, key: str, text: str) -> str | None:
        """Write a text unless there is one. Return that which is there afterwards; None without an answer."""

        def write(store: Any) -> str:
            return texts.write_first(store, key, text)

        return self.call(write)

    def count(self, key: str, amount: int = 0) -> int | None:
        """Add to a number, and return it; None without an answer."""

        def add(store: Any) -> int:
            return int(store.add(key, amount))

        return self.call(add)

    def close(self) -> None:
        """End the thread: a process that ends in a call of the store is aborted."""
        self._tasks.put(None)
        self._thread.join(_FAREWELL)

    def _run(self) -> None:
        """Make the calls: the thread "board"."""
        try:
            store = _connect(self._store, self._name)
            while True:
                task = self._tasks.get()
                if task is None:  # close() has sent it
                    break
                task(store)
                # also after the caller has given up: from here on the store answers again
                self._is_busy.clear()
        except RuntimeError as error:  # the process that holds the store has ended
            self.lost = next(iter(str(error).splitlines()), "") or "closed"


def _connect(store: Any, name: str) -> Any:
    """Return a connection of its own to the server of a store; the store itself if it has no server."""
    # torch wraps a store in prefixes: the innermost one has the address of the server
    inner = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    distributed: Any = torch.distributed  # its stubs do not name the stores
    if isinstance(inner, distributed.TCPStore):
        inner = distributed.TCPStore(
            inner.host, inner.port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT
        )
    return distributed.PrefixStore(name, inner)
