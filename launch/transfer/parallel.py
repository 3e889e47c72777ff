"""Transfer many files in parallel, with a progress bar. The first failure stops all transfers."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from tqdm import tqdm

from common.distributed import preemption
from common.object_store.store import ObjectStore
from launch.explain import human_size

THREADS = 16
INTERRUPTED = 130  # exit code
_ABORTING = 60.0  # seconds after Ctrl-C to end the requests under way and remove unfinished uploads
Progress = Callable[[int], object]  # takes a number of bytes


def run(store: ObjectStore, text: str, size: int, tasks: Sequence[Callable[[Progress], Any]]) -> list[Any]:
    """Run the tasks in threads and return [task(progress) for task in tasks].

    progress takes a number of bytes, of `size` in total. If a task fails, or on Ctrl-C, stop the others,
    abort unfinished uploads, and raise that error.
    """
    preemption.unwind_within(_ABORTING)
    interval = 0.1 if os.isatty(2) else 10  # seconds
    bar = tqdm(
        desc=text, total=size, unit="B", unit_scale=True, delay=0.5, mininterval=interval, disable=not size
    )
    pool = ThreadPoolExecutor(THREADS, "transfer")
    try:
        futures = [pool.submit(task, bar.update) for task in tasks]
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
        return [future.result() for future in futures]
    except BaseException:
        store.stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        bar.close()


def describe(sizes: list[int]) -> str:
    """Return "3 files, 1.2 MB"."""
    return f"{len(sizes)} file{'s' * (len(sizes) != 1)}, {human_size(sum(sizes))}"
