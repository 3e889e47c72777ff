"""What the ranks of a run tell each other while their main threads are blocked: texts in the store.

A call of the store may block for ever, for example when the process that holds it is stopped. So one thread
makes all calls, over a connection of its own, and the caller waits for a limited time.
"""

import concurrent.futures
import datetime
import queue
import threading
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
    """Texts that all ranks read and write. Each method returns None if the store does not answer in time.

    store: of the default group. name: the same on all ranks, and unique: a restart may find the same store.
    `lost`: why the store has closed the connection; "" before.
    """

    def __init__(self, store: "Store", name: str):
        self.lost = ""
        self._store = store
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Callable[[Any], Any], Any] | None] = queue.SimpleQueue()
        self._last: concurrent.futures.Future[Any] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="board", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Any], T]) -> T | None:
        """Return function(store). While the store does not answer, later calls return at once."""
        # held until the answer: the main thread and that of the watch may call at the same moment
        with self._lock:
            if self.lost or (self._last and not self._last.done()):
                return None
            future: concurrent.futures.Future[T] = concurrent.futures.Future()
            self._last = future
            self._tasks.put((function, future))
            try:
                return future.result(_ANSWER)
            except (concurrent.futures.TimeoutError, RuntimeError):  # the latter: the store is lost
                return None

    def read(self, *keys: str) -> list[str] | None:
        """Return the text of each key; "" for a key that has none."""
        return self.call(lambda store: [texts.read(store, key) for key in keys])

    def write(self, key: str, text: str) -> None:
        """Write a text."""
        self.call(lambda store: texts.write(store, key, text))

    def write_first(self, key: str, text: str) -> str | None:
        """Write a text if the key has none. Return the text that the key has then."""
        return self.call(lambda store: texts.write_first(store, key, text))

    def count(self, key: str, amount: int = 0) -> int | None:
        """Add an amount to the number of a key, and return the sum."""
        return self.call(lambda store: int(store.add(key, amount)))

    def close(self) -> None:
        """End the thread. Without this, a process that ends while the thread calls the store is aborted."""
        self._tasks.put(None)
        self._thread.join(_FAREWELL)

    def _run(self) -> None:
        """Make the calls: the thread "board"."""
        store: Any = None
        while task := self._tasks.get():  # close() sends None
            function, future = task
            try:
                store = store or _connect(self._store, self._name)
                future.set_result(function(store))
            except RuntimeError as error:  # the process that holds the store has ended
                self.lost = next(iter(str(error).splitlines()), "") or "closed"
                future.set_exception(error)
                return


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
