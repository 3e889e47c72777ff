"""Read the samples of a batch and work on them in threads, in advance if the store is remote."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from datasets.stores.store import Store

_THREADS = 2  # while one batch is received, the next is requested


class Reader:
    """A reader of a store for an engine.

    pool: of threads, which close() ends. per_task: samples of a task, to spread the cost of starting it.
    """

    def __init__(self, store: Store, pool: ThreadPoolExecutor, per_task: int):
        self._store = store
        self._pool = pool
        self.per_task = per_task
        self._fetchers = None  # threads that wait for a remote store
        if store.is_remote:
            self._fetchers = ThreadPoolExecutor(_THREADS, "fetcher")

    def start(self, ids: np.ndarray, work: Callable[[range, list[bytes | np.ndarray]], Any]) -> list[Future]:
        """Start the tasks of a batch. Each returns work(places, samples) for a range of positions in `ids`.

        samples: as returned by Store.read(). If the store is remote, reading of all ids starts now, otherwise
        with each task. An engine calls it in the thread of the training, some batches ahead; work() runs in
        the threads of the pool.
        """
        fetched = None
        if self._fetchers:  # one request for the batch: a network has a price for each
            fetched = self._fetchers.submit(self._store.read, ids)

        def run(places: range) -> Any:
            """Do one task, in a thread of the pool. It waits for the samples if they are on their way."""
            task = slice(places.start, places.stop)
            samples = fetched.result()[task] if fetched else self._store.read(ids[task])
            return work(places, samples)

        places = range(len(ids))
        firsts = range(0, len(ids), self.per_task)
        return [self._pool.submit(run, places[first : first + self.per_task]) for first in firsts]

    def close(self) -> None:
        """End the threads; tasks that have not begun are dropped. An engine calls it when it closes."""
        for pool in (self._pool, self._fetchers):
            if pool:
                pool.shutdown(cancel_futures=True)
