"""SIGTERM in a process that was forked from a training: a worker of a DataLoader, or a process of the loop.

A platform, as Slurm, sends it to all processes of a job. The training saves then, and may need the others
until it ends. But the parent may send it to a process that it does not need any more, as Python does at its
end, and waits for it. The process cannot see who has sent it: it asks whether its parent has got it, too.
"""

import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

# the byte that a training shares with the processes that are forked from it
ASKED = 1  # the training has got a signal to stop
ENDS = 2  # the training ends, and ends its children
_PARENT_IS_SLOW = 2.0  # seconds to write ASKED: its main thread may hold the lock of Python
_POLL = 0.02  # seconds
_masks = threading.local()  # `before`: the signals that this thread had blocked before a fork
_is_prepared = False  # a child of a child has the functions of its parent


def prepare(
    shared: mmap.mmap,
    watching: threading.Event,
    ignore: Callable[[], object],
    forget: Callable[[], object],
) -> None:
    """Prepare this process for a fork. Call it before each fork.

    shared: the byte that the children read: 0, ASKED or ENDS.
    watching: set when the training begins.
    ignore: called in a child; makes it ignore all signals of a job except SIGTERM.
    forget: called in a child; it then writes no numbers of signals to the pipe of this process.
    """
    global _is_prepared
    # until the child has a handler: a SIGTERM in between would be lost, and the parent would wait for ever
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if _is_prepared:
        return
    _is_prepared = True

    def begin_child() -> None:
        # once the loop watches, a platform's signal must not end a worker before its job has saved
        if watching.is_set():
            ignore()
            _obey_parent(shared)
        else:
            forget()
        _restore_mask()

    os.register_at_fork(after_in_parent=_restore_mask, after_in_child=begin_child)
    # multiprocessing calls it at the end of Python, before it sends SIGTERM to its children
    Finalize(None, shared.__setitem__, args=(0, ENDS), exitpriority=1)


def _restore_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _obey_parent(shared: mmap.mmap) -> None:
    """End this process at a SIGTERM of its parent, and ignore that of a platform. A forked process calls it
    at once."""

    def end_by_signal(number: int, frame: FrameType | None) -> None:
        if not _is_for_all(shared):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def end_worker(number: int, frame: FrameType | None) -> None:
        if not _is_for_all(shared):
            os._exit(0)  # torch raises an error in the parent after any other exit code

    signal.signal(signal.SIGTERM, end_by_signal)
    handling: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
    if handling is None:
        return
    set_handlers = handling._set_worker_signal_handlers  # in torch 2.1 to 2.14

    def set_handlers_of_worker() -> None:
        set_handlers()
        signal.signal(signal.SIGTERM, end_worker)

    # a worker calls it after the fork: torch's own handler would end it at the signal of a platform
    handling._set_worker_signal_handlers = set_handlers_of_worker


def _is_for_all(shared: mmap.mmap) -> bool:
    """Wait until the parent has got a signal or ends, but not for long. Return whether it has got one."""
    deadline = time.monotonic() + _PARENT_IS_SLOW
    while shared[0] not in (ASKED, ENDS) and time.monotonic() < deadline:
        time.sleep(_POLL)
    return shared[0] == ASKED
