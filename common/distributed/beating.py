"""Send heartbeats while this process works for long, and the others wait at a barrier (barrier.py)."""

import contextlib
import threading
from collections.abc import Iterator

from bootfile.ground.errors import BadInput
from common.distributed import barrier

_BEAT = 2.0  # seconds between two heartbeats


@contextlib.contextmanager
def beating(name: str) -> Iterator[None]:
    """Send heartbeats to the ranks that wait at this barrier during the block, which may take hours.

    A rank enters it for a long task before the barrier that cannot call barrier.beat(); a thread sends them.
    Without them the others would give up.
    """
    ended = threading.Event()

    def send() -> None:
        """Send heartbeats until the block ends; in the thread."""
        with contextlib.suppress(BadInput):  # wait_for_all() raises the error of the other process, too
            while not ended.wait(_BEAT):
                barrier.beat(name)

    thread = threading.Thread(target=send, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
