"""A platform takes the machine away: SIGTERM, or SIGUSR2, noticed whatever the process is doing.

A Python signal handler waits until the interpreter runs again, which it does not while a collective blocks on
a lost peer. So the C-level handler writes the signal's number to a pipe (signal.set_wakeup_fd) and a thread
reads it.
"""

import contextlib
import os
import signal
import threading

from common.exits import leave, say_error

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
EXIT_CODE = 128 + signal.SIGTERM

_KEY = "stop"
_POLL = 0.5  # seconds

_asked = threading.Event()
_store = None


def asked() -> bool:
    """Whether this process, or another of the job, was asked to stop."""
    return _asked.is_set()


def share(store) -> None:
    """Tell the others, and hear of them, through this torch.distributed store: a platform may signal one
    node only, and evaluating processes do not talk to each other."""
    global _store
    _store = store


def watch(grace: float) -> None:
    """From now on SIGTERM and SIGUSR2 only make asked() true; the job stops at its next step.

    Where it has not left `grace` seconds after that, the process ends with EXIT_CODE. Call it in the main
    thread, once. A forked child (a DataLoader's worker) has nothing to save and does not react: its parent
    ends it.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, _note)
        signal.siginterrupt(number, False)  # system calls of libraries go on
    os.register_at_fork(after_in_child=ignore)
    threading.Thread(target=_bound, args=(grace,), name="grace", daemon=True).start()
    threading.Thread(target=_listen, args=(reader, grace), name="signals", daemon=True).start()
    if _store:
        threading.Thread(target=_follow, name="others' signals", daemon=True).start()


def ignore(worker: int = 0) -> None:
    """Do not react to the signals: for processes that a job starts. As a DataLoader's worker_init_fn, too:
    the loader gives its workers handlers of its own after the fork."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _note(number, frame):
    """The handler that Python calls when it can; the thread was told before."""


def _listen(reader: int, grace: float) -> None:
    while number := os.read(reader, 1):
        if number[0] in SIGNALS:
            break
    _asked.set()  # before anything that could block or fail: a log may be gone
    if _store:
        with contextlib.suppress(RuntimeError):  # the store's process is gone, and so are the others soon
            _store.add(_KEY, 1)
    with contextlib.suppress(OSError, ValueError):
        print(
            f"{signal.Signals(number[0]).name}: stopping at the next step, within {grace:.0f} s", flush=True
        )


def _follow() -> None:
    with contextlib.suppress(RuntimeError):
        while not _asked.wait(_POLL):
            if _store.add(_KEY, 0):
                _asked.set()


def _bound(grace: float) -> None:
    _asked.wait()
    threading.Event().wait(grace)
    last = threading.Timer(1, os._exit, (EXIT_CODE,))  # should the message block, as on a full pipe
    last.daemon = True
    last.start()
    say_error(f"asked to stop {grace:.0f} s ago and not ready: leaving without another checkpoint")
    leave(EXIT_CODE)
