"""Read the batches of a store, in advance if it is remote."""

import concurrent.futures
from collections.abc import Callable

import numpy as np

from datasets.stores.store import Store

_THREADS = 2  # while one batch is received, the next is requested


class Reader:
    """A reader of a store for an engine."""

    def __init__(self, store: Store):
        self._store = store
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        if store.is_remote:
            self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "fetcher")

    def start(self, ids: np.ndarray) -> Callable[[range], list[bytes | np.ndarray]]:
        """Return a function that returns the samples for a range of positions in `ids`, as Store.read() does.

        If the store is remote, reading of all ids starts now. Otherwise reading starts with the call.
        """
        if self._threads is None:
            return lambda places: self._store.read(ids[places.start : places.stop])
        asked = self._threads.submit(self._store.read, ids)
        return lambda places: asked.result()[places.start : places.stop]

    def close(self) -> None:
        if self._threads:
            self._threads.shutdown(cancel_futures=True)
