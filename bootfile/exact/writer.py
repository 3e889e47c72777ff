"""Run writes in a thread, one after the other, while the training continues."""

import collections
import concurrent.futures
import os
from collections.abc import Callable
from typing import NamedTuple


class _Write(NamedTuple):
    """A write in flight. memory: what it reads, so that nothing else may be copied there."""

    name: str
    memory: object
    future: concurrent.futures.Future[None]


class Writer:
    """A thread that writes files, and the writes that it has not finished.

    failed: called by collect(), in the thread of the loop, with the name and the error of a write that has
    failed. `failures`: kind of file (".pt") -> why its last write failed, for the end of the run.
    """

    def __init__(self, failed: Callable[[str, BaseException], object]):
        self.failures: dict[str, str] = {}
        self._failed = failed
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "writer")
        self._writes: collections.deque[_Write] = collections.deque()  # until collect() has seen their ends

    def submit(self, name: str, memory: object, write: Callable[[], None]) -> None:
        """Call write() in the thread, after the writes before."""
        self._writes.append(_Write(name, memory, self._pool.submit(write)))

    def reads(self, memory: object) -> bool:
        """Return whether a write in flight reads this memory."""
        return any(write.memory is memory for write in self._writes)

    def collect(self, wait: bool = False) -> None:
        """Report the writes that have ended with an error. wait: wait for those in flight first."""
        # in the order of the writes: a later success of the same kind of file takes a failure back
        while self._writes and (wait or self._writes[0].future.done()):
            name, _, future = self._writes.popleft()
            if error := future.exception():
                self._failed(name, error)
            else:
                self.failures.pop(os.path.splitext(name)[1], None)

    def wait(self, seconds: float) -> None:
        """Wait for the writes in flight, at most `seconds`."""
        concurrent.futures.wait([write.future for write in self._writes], seconds)

    def stop(self) -> None:
        """End the thread after its last write."""
        self._pool.shutdown(wait=False)
