"""Run many transfers in threads. The first failure stops all of them."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from common.object_store.store import ObjectStore

T = TypeVar("T")


def run(
    store: ObjectStore, tasks: Iterable[Callable[[], T]], beat: Callable[[], object] = lambda: None
) -> list[T]:
    """Run the tasks in store.threads threads, and return [task() for task in tasks].

    If a task or beat() raises an exception, or on Ctrl-C, stop the store and raise that exception.

    beat: called about once a second, and after each task.
    """
    results: dict[int, T] = {}
    running: dict[Future[T], int] = {}
    pool = ThreadPoolExecutor(store.threads, "transfer")
    waiting = enumerate(tasks)
    try:
        while True:
            while len(running) < 4 * store.threads and (task := next(waiting, None)):
                running[pool.submit(task[1])] = task[0]
            if not running:
                return [results[number] for number in sorted(results)]
            for done in wait(running, 1.0, FIRST_COMPLETED).done:
                results[running.pop(done)] = done.result()
            beat()
    except BaseException:
        store.stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
