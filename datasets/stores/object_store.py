"""Read files below a URL: many objects at a time, without a copy on the node."""

from typing import Any

import numpy as np

from common.files import is_url
from datasets.stores.files import FileStore
from datasets.stores.store import Threads

_THREADS = 32  # most threads wait for the network


class ObjectFiles(FileStore):
    """A FileStore of an index whose root is a URL. It refuses contents that differ from the scan."""

    is_remote = True

    def __init__(self, index: Any):
        from common.object_store.store import ObjectStore  # jobs with folders do not need it

        super().__init__(index, verified=True)
        self.store = ObjectStore(index.root, _THREADS)
        self._threads = Threads(_THREADS, "objects")

    def read(self, ids: np.ndarray) -> list[bytes | np.ndarray]:
        return self._threads.map(self.content, np.asarray(ids).tolist())

    def close(self) -> None:
        self._threads.close()
        self.store.close()

    def _content(self, path: str) -> bytes:
        return self.store.read(path[len(self.index.root) + 1 :])


def origin(index: Any, verified: bool = False) -> FileStore:
    """Return the store of the files that an index was made of."""
    return ObjectFiles(index) if is_url(getattr(index, "root", None)) else FileStore(index, verified)
