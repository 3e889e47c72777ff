"""What a store that is far away has of a batch, asked for before the batch is worked on."""

import concurrent.futures

import numpy as np

_THREADS = 2  # while one batch is received, the next is asked for


class Ahead:
    """ask(ids) begins; what it returns gives, for a place in ids, what to add to the arguments of the store's
    image() and encoded(): nothing where the store is on this node, which costs nothing."""

    def __init__(self, store):
        self._fetch, self._threads = getattr(store, "fetch", None), None
        if self._fetch:
            self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "fetcher")

    def ask(self, ids: np.ndarray):
        if self._threads is None:
            return _nothing
        asked = self._threads.submit(self._fetch, ids)
        return lambda place: (asked.result()[place],)

    def close(self) -> None:
        if self._threads:
            self._threads.shutdown(cancel_futures=True)


def _nothing(place: int) -> tuple:
    return ()
