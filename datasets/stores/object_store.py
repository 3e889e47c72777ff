"""Images as they lie below a URL: a batch is asked for ahead of time, many objects at once, and nothing of it
stays on the node. A pack or a shared cache before it is filled from it.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from common.exits import BadInput
from common.object_store.store import ObjectStore
from datasets.stores.files import FileStore

_THREADS = 32  # most of them wait


class ObjectFiles(FileStore):
    """A FileStore of an index whose root is a URL. What is not as it was scanned is refused.

    Threads may share it; it can be pickled, and survives a fork.
    """

    def __init__(self, index):
        super().__init__(index, verified=True)
        self.store = ObjectStore(index.root, _THREADS)
        self._threads, self._pid = None, 0

    def fetch(self, ids: np.ndarray) -> list[bytes | None]:
        """The contents of a batch, [n]; None for what could not be read: reading it again says why."""
        return list(self._pool().map(self._tried, np.asarray(ids).tolist()))

    def image(self, id: int, scratch: np.ndarray | None = None, fetched: bytes | None = None) -> np.ndarray:
        return super().image(id, scratch) if fetched is None else self.holding(fetched).image(id, scratch)

    def encoded(self, id: int, fetched: bytes | None = None) -> bytes:
        return super().encoded(id) if fetched is None else self.holding(fetched).encoded(id)

    def holding(self, content: bytes) -> "FileStore":
        """A store of the one sample that was fetched."""
        return _Held(self.index, content)

    def close(self) -> None:
        if self._threads and self._pid == os.getpid():
            self._threads.shutdown(cancel_futures=True)
        self._threads = None
        self.store.close()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_threads": None}

    def _content(self, path: str) -> bytes:
        return self.store.read(path[len(self.index.root) + 1 :])

    def _tried(self, id: int) -> bytes | None:
        try:
            return self.read(id)
        except BadInput:
            return None

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None or self._pid != os.getpid():
            self._threads, self._pid = ThreadPoolExecutor(_THREADS, "objects"), os.getpid()
        return self._threads


class _Held(FileStore):
    def __init__(self, index, content: bytes):
        super().__init__(index)
        self._held = content

    def read(self, id: int) -> bytes:
        return self._held
