"""Many files to or from an object store at a time, with a bar; the first that fails ends them all."""

import os
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from tqdm import tqdm

from common.object_store.store import ObjectStore

THREADS = 16
INTERRUPTED = 130  # exit code


def run(store: ObjectStore, text: str, size: int, tasks: list[Callable]) -> list:
    """[task(progress) for task in tasks], where progress takes bytes, of `size` in all. When one fails, or on
    Ctrl-C, the others are ended, unfinished uploads taken back, and that is raised."""
    often = 0.1 if os.isatty(2) else 10  # seconds
    bar = tqdm(
        desc=text, total=size, unit="B", unit_scale=True, delay=0.5, mininterval=often, disable=not size
    )
    pool = ThreadPoolExecutor(THREADS, "transfer")
    try:
        futures = [pool.submit(task, bar.update) for task in tasks]
        wait(futures, return_when=FIRST_EXCEPTION)
        failed = [future.exception() for future in futures if future.done() and future.exception()]
        if failed:
            raise failed[0]
        return [future.result() for future in futures]
    except BaseException:
        store.stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        bar.close()


def amount(files: int, size: int) -> str:
    """For people: "3 files, 1.2 MB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{files} file{'s' * (files != 1)}, {size / scale:.1f} {unit}"
    return f"{files} file{'s' * (files != 1)}, {size} B"
