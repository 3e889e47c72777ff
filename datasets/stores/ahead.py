"""Work that threads do some steps ahead, with the results in order: batches, and their samples."""

import collections
import concurrent.futures
import itertools
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

import numpy as np

from datasets.stores.files import Store

_Item = TypeVar("_Item")


def work_ahead(
    items: Iterable[_Item], begin: Callable[[_Item], list[concurrent.futures.Future]], count: int
) -> Generator[tuple[_Item, list[Any]], None, None]:
    """Yield (item, results of its tasks) in order. The next `count` items have begun before one is yielded.
    begin: called with an item in this thread; returns its tasks. No task runs after the generator is closed.
    The engines use it for the batches of an epoch, and packs for the samples that they write."""
    remaining = iter(items)
    begun: collections.deque[tuple[_Item, list[concurrent.futures.Future]]] = collections.deque()
    try:
        while True:
            for item in itertools.islice(remaining, count + 1 - len(begun)):
                begun.append((item, begin(item)))
            if not begun:
                return
            # it stays in `begun` until its tasks have ended: if one fails, the others are waited for below
            item, tasks = begun[0]
            results = [task.result() for task in tasks]
            begun.popleft()
            yield item, results
    finally:  # the caller has left, or a task has failed: its memory and files are free only without tasks
        unfinished = list(itertools.chain(*(tasks for _, tasks in begun)))
        for task in unfinished:
            task.cancel()
        concurrent.futures.wait(unfinished)


class Reader:
    """A reader of a store for an engine. pool: of threads, which close() ends. per_task: samples of a task,
    to spread the cost of starting it."""

    def __init__(self, store: Store, pool: concurrent.futures.ThreadPoolExecutor, per_task: int):
        self._store = store
        self._pool = pool
        self.per_task = per_task
        # threads that wait for a remote store: while one batch is received, the next is requested
        self._fetchers = concurrent.futures.ThreadPoolExecutor(2, "fetcher") if store.is_remote else None

    def start(
        self, ids: np.ndarray, work: Callable[[range, list[bytes | np.ndarray]], Any]
    ) -> list[concurrent.futures.Future]:
        """Start the tasks of a batch. Each returns work(places, samples) for a range of positions in `ids`.

        samples: as returned by Store.read(). If the store is remote, reading of all ids starts now, otherwise
        with each task. An engine calls it in the thread of the training, some batches ahead; work() runs in
        the threads of the pool.
        """
        # one request for the batch: each request over a network takes time
        fetched = self._fetchers.submit(self._store.read, ids) if self._fetchers else None

        def run(places: range) -> Any:
            """Do one task, in a thread of the pool. It waits for the samples if they are on their way."""
            if fetched:
                return work(places, fetched.result()[places.start : places.stop])
            return work(places, self._store.read(ids[places.start : places.stop]))

        places = range(len(ids))
        firsts = range(0, len(ids), self.per_task)
        return [self._pool.submit(run, places[first : first + self.per_task]) for first in firsts]

    def close(self) -> None:
        """End the threads; tasks that have not begun are dropped."""
        for pool in (self._pool, self._fetchers):
            if pool:
                pool.shutdown(cancel_futures=True)
