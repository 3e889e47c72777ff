"""A pool of threads that read and compute images."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from bootfile.loaders.loader import NotDelivered
from bootfile.machine import process_limits


def start_pool(workers: int, name: str) -> ThreadPoolExecutor:
    """Return a pool in whose threads torch starts none of its own: for few images they do not pay. All of
    its threads have started: a later start would change the number of torch's threads during the training.
    Raises NotDelivered if a limit does not allow that many threads."""
    threads = torch.get_num_threads()
    all_begun = threading.Barrier(workers)

    def begin() -> None:
        """Set the number of torch's threads."""
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread takes torch's common number at its first look: now it is 1
        # wait for the other threads: the pool starts a thread only if no earlier one is idle
        with contextlib.suppress(threading.BrokenBarrierError):  # a thread cannot be started
            all_begun.wait()

    pool = ThreadPoolExecutor(workers, name, initializer=begin)
    line = process_limits.shortage(workers, f"{workers} threads of the loader")
    try:
        # one task for each thread, so that all of them start now
        if not line:
            wait([pool.submit(int) for _ in range(workers)])
    except RuntimeError as error:
        line = process_limits.explain(error, f"{workers} threads of the loader need {workers}")
        if not line:
            raise
    finally:
        all_begun.abort()  # threads that have started may wait for others
        torch.set_num_threads(threads)  # begin() also changed the default of later threads
    if line:
        pool.shutdown()
        raise NotDelivered(f"{line}, or use fewer --workers")
    return pool
