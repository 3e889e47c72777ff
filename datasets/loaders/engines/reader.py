"""Reads the batches of a store; a store that is far away is asked before a batch is needed."""

import concurrent.futures
from collections.abc import Callable

import numpy as np

from datasets.stores.store import Store

_THREADS = 2  # while one batch is received, the next is asked for


class Reader:
    """Reads from a store on behalf of an engine."""

    def __init__(self, store: Store):
        self._store = store
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        if store.is_remote:
            self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "fetcher")

    def start(self, ids: np.ndarray) -> Callable[[range], list[bytes | np.ndarray]]:
        """Return a function that gives what Store.read() returns for a range of places in `ids`.

        If the store is remote, reading starts now, for all of them; else when the function is called.
        """
        if self._threads is None:
            return lambda places: self._store.read(ids[places.start : places.stop])
        asked = self._threads.submit(self._store.read, ids)
        return lambda places: asked.result()[places.start : places.stop]

    def close(self) -> None:
        if self._threads:
            self._threads.shutdown(cancel_futures=True)
