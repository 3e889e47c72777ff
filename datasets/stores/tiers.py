"""The stores of a job's data sets: a pack on the node, a shared cache in front of the files, or the files.

A pack has every sample. A cache is asked for each sample. A missing sample is made from its file in the form
of the cache, so both tiers return the same bits.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from datasets.folders.walk import map_files
from datasets.stores import forms, pack
from datasets.stores.files import FileStore, Store, is_scanned

if TYPE_CHECKING:
    from datasets.stores.connection import Address
    from datasets.stores.redis_store import RedisStore

MODES = ("active", "offline")


class Tiers(Store):
    """A shared cache in front of the files. In active mode missing samples are put into the cache."""

    is_remote = True

    def __init__(self, cache: "RedisStore", files: FileStore):
        self.cache = cache
        self.files = files
        self.index = files.index
        self.form = cache.form

    def read(self, ids: np.ndarray) -> list[bytes | np.ndarray]:
        """Return the samples of a batch. A fault of the cache is a miss. For a miss it returns the bytes of
        the file, which decode() converts to the form of the cache."""
        ids = np.asarray(ids, dtype=np.int64)
        samples: list = self.cache.read(ids)
        missing = [place for place, content in enumerate(samples) if content is None]
        # threads read them if they are slow
        contents = map_files(self.files.content, ids[missing].tolist())
        for place, content in zip(missing, contents, strict=True):
            samples[place] = content
            # the bytes of the file are the sample; other forms are put after decode()
            if self.form == "encoded":
                self._put(ids[place], content, forms.convert(self.index, ids[place], content, self.form))
        return samples

    def decode(self, id: int, content: bytes | np.ndarray, scratch: np.ndarray | None = None) -> np.ndarray:
        """Return the pixels of a sample, as Store.decode() does. A thread or a worker of an engine decodes a
        miss here, and then puts it into the cache."""
        if self.form == "encoded" or isinstance(content, np.ndarray):
            return super().decode(id, content, scratch)
        sample = forms.convert(self.index, id, content, self.form, scratch=scratch)
        self._put(id, content, sample)
        return np.frombuffer(sample.content, np.uint8).reshape(sample.height, sample.width, 3)

    def close(self) -> None:
        """Release the cache, at the end of a job."""
        self.cache.close()

    def _put(self, id: int, content: bytes, sample: forms.Sample) -> None:
        """Put a sample into the cache, unless its file was changed since the scan. It does not wait."""
        if self.cache.wants_samples() and is_scanned(self.index, id, content):
            self.cache.put_later(int(id), sample)


class Stores:
    """The stores of a job's data sets: packs, a shared cache, or the files.

    folder: of packs, or None. cache: the URL of a shared cache, or its Address (connection.py), or None. Not
        both.
    mode: one of MODES. log: called with one line of text.
    form: of the packs. A shared cache has the form of its URL.
    Raises BadInput if an argument is wrong, and as the stores do.
    """

    def __init__(
        self,
        folder: str | None,
        cache: "str | Address | None",
        mode: str,
        log: Callable[[str], None] = print,
        form: str = "decoded",
    ):
        self.folder = folder
        self.mode = mode
        self._log = log
        self.form = form
        self._server: Any = None
        self._opened = contextlib.ExitStack()  # what close() closes, the server last
        self._known: dict[str, Store] = {}  # fingerprint of an index -> its store
        if cache:
            from datasets.stores import connection

            address = connection.parse(cache) if isinstance(cache, str) else cache
            self._server = self._kept(connection.Server(address, log))

    def open(self, index: Any) -> Store:
        """Return the store of an ImageFolderIndex, the same for the same index. close() closes it. Every rank
        calls it at the start of a job. With a folder it may build the pack, for hours."""
        if index.fingerprint not in self._known:
            self._known[index.fingerprint] = self._kept(self._open(index))
        return self._known[index.fingerprint]

    def _open(self, index: Any) -> Store:
        """Return a new store."""
        if self.folder:
            return pack.build(index, pack.place(self.folder, index, self.form), self.form)
        if not self._server:
            return FileStore(index)
        from datasets.stores.redis_store import RedisStore

        cached = RedisStore(self._server, index, self.mode)
        # in this mode nothing fills the cache: each sample of the run would come from its file
        if self.mode == "offline" and cached.is_empty():
            self._log(f"the cache holds nothing of {cached.name}: --cache_mode offline needs a preload")
        return Tiers(cached, FileStore(index))

    def close(self) -> None:
        """Close the stores. The last process that closes an active cache deletes it. Every rank of a job
        calls it at a good end; the references of a killed job expire."""
        self._opened.close()

    def _kept(self, opened: Any) -> Any:
        """Return an object that close() will close."""
        return self._opened.enter_context(contextlib.closing(opened))
