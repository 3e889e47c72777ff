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
        self._store, self._pool, self.per_task = store, pool, per_task
        self._fetchers = ThreadPoolExecutor(_THREADS, "fetcher") if store.is_remote else None

    def start(self, ids: np.ndarray, work: Callable[[range, list[bytes | np.ndarray]], Any]) -> list[Future]:
        """Start the tasks of a batch. Each returns work(places, samples) for a range of positions in `ids`.

        samples: as returned by Store.read(). If the store is remote, reading of all ids starts now, otherwise
        with each task.
        """
        fetched = self._fetchers.submit(self._store.read, ids) if self._fetchers else None

        def run(places: range) -> Any:
            own = slice(places.start, places.stop)
            return work(places, fetched.result()[own] if fetched else self._store.read(ids[own]))

        firsts = range(0, len(ids), self.per_task)
        return [self._pool.submit(run, range(len(ids))[first : first + self.per_task]) for first in firsts]

    def close(self) -> None:
        for pool in (self._pool, self._fetchers):
            if pool:
                pool.shutdown(cancel_futures=True)
