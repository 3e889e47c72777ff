"""Serve a request to stop while the main thread waits for data, which may never come."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from bootfile.processes import signals

_SOON = 2.0  # seconds

_working = threading.Lock()  # held by the thread of the loop while it does not wait
_serve: Callable[[], object] | None = None  # function of the last serve_when_stopped()
reads: dict[int, tuple[float, str]] = {}  # thread -> (start, name of the sample that it reads)
batches = 0  # how many waits have begun: stuck.py takes a new one for progress
before_next: list[Callable[[], object]] = []  # see call_before_next()
_only_evaluates = False  # see serve_when_stopped()
_before_end: Callable[[], object] | None = None  # its function for data that cannot be read


@contextlib.contextmanager
def waiting(is_training: bool = True) -> Iterator[None]:
    """Mark a block in which the loop waits for a batch, so that another thread may save meanwhile. The block
    does not end before that save does.

    is_training: the batch is one of the training. While a loop of one's own waits for a batch of an
    evaluation, nothing is saved: its model may hold other weights, and what follows is a part of the step.
    """
    global batches
    batches += 1
    # released for the wait: the thread of _wait() may save only while the loop computes nothing
    is_held = _working.locked() and (is_training or _only_evaluates)
    if is_held:
        _working.release()
    try:
        yield
    finally:
        # waits for a save that has begun: it must not see the next step half done
        if is_held:
            _working.acquire()


def call_before_next() -> None:
    """Call each function of `before_next` once. The training loader calls it when the loop asks for the next
    batch, in the thread of the loop; the loader of an evaluation does not."""
    while before_next:
        before_next.pop()()


def call_before_end(is_training: bool = True) -> None:
    """Save what the loop has done. A loader calls it in the thread of the loop before it raises Unavailable,
    which ends the loop. Nothing happens in a job of several processes, or before the training. is_training:
    as for waiting()."""
    if _before_end and (is_training or _only_evaluates):
        _before_end()


def serve_when_stopped(
    serve: Callable[[], object], before_end: Callable[[], object], only_evaluates: bool = False
) -> None:
    """Call serve() in a thread if the process is asked to stop while the calling thread is in waiting().
    before_end: see call_before_end(). only_evaluates: an evaluation changes nothing that a checkpoint holds,
    and a restart repeats it, as that of a job.

    The loop calls it when training begins, in a job of one process: several would have to agree on a step.
    The calling thread continues when serve() returns. A process may call this again, as a notebook does: the
    last function counts.
    """
    global _serve, _before_end, _only_evaluates
    is_first = _serve is None
    _only_evaluates = only_evaluates
    _serve = serve
    _before_end = before_end
    if is_first:
        # the loop computes from here on: the thread waits for the next waiting()
        _working.acquire()
        threading.Thread(target=_wait, name="stop while waiting", daemon=True).start()


def _wait() -> None:
    """Call the function of serve_when_stopped() if the loop does not stop by itself: a thread."""
    signals.wait()
    time.sleep(_SOON)  # usually the next batch comes soon, and the loop saves by itself
    with _working:
        if _serve:
            _serve()
