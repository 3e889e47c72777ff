"""A shared cache before the files: for a whole batch, the first tier that has a sample gives it.

What is missed is made from the file, in the form that the cache has, so a sample has the same bits wherever
it came from; in active mode it is then put into the cache. (A pack on the node comes before both, but it has
every sample or none: datasets/stores/__init__.py chooses.)
"""

import contextlib

import numpy as np

from common.exits import BadInput
from datasets.stores import forms
from datasets.stores.files import FileStore, origin
from datasets.stores.shared.redis import RedisStore


class Tiers:
    """A store, for threads and engines, of a RedisStore and the files behind it. Engines call fetch(ids)
    ahead of time, and give each sample what came of it."""

    def __init__(self, cache: RedisStore, files: FileStore):
        self.cache, self.files, self.index, self.form = cache, files, files.index, cache.form
        self._scanned = origin(files.index, verified=True)
        self._said = False

    def fetch(self, ids: np.ndarray) -> list[np.ndarray | bytes | None]:
        """What the cache has of a batch, [n], and the bytes of what it has not where the files are far away.
        Never raises: whatever is wrong with the cache is a miss."""
        try:
            found = self.cache.fetch(ids)
        except Exception as error:  # a mistake of ours, even
            if not self._said:
                self._said = True
                self.cache.servers.log(f"cache {self.cache.servers.address}: {error!r}; the files are read")
            found = [None] * len(ids)
        if hasattr(self.files, "fetch"):
            missing = [place for place, value in enumerate(found) if value is None]
            for place, content in zip(missing, self.files.fetch(np.asarray(ids)[missing]), strict=True):
                found[place] = content
        return found

    def sample(
        self, id: int, fetched: np.ndarray | bytes | None = None, scratch: np.ndarray | None = None
    ) -> forms.Sample:
        """Raises BadInput as FileStore does."""
        files, scanned = self.files, self._scanned
        if isinstance(fetched, bytes):
            files = scanned = self.files.holding(fetched)
            fetched = None
        sample = self.cache.checked(id, fetched)
        if sample is None and self.cache.wants(id):
            with contextlib.suppress(BadInput):  # what was changed since the scan is for nobody else
                sample = forms.make(scanned, id, self.form, scratch=scratch)
                self.cache.put_later(id, sample)
        return sample or forms.make(files, id, self.form, scratch=scratch)

    def image(
        self, id: int, scratch: np.ndarray | None = None, fetched: np.ndarray | bytes | None = None
    ) -> np.ndarray:
        if fetched is None and self.form == "encoded" and not self.cache.wants(id):
            return self.files.image(id, scratch)  # at the cost of the files alone
        sample = self.sample(id, fetched, scratch)
        return forms.image(self.index, id, self.form, sample, scratch, self.cache.servers.address)

    def encoded(self, id: int, fetched: np.ndarray | bytes | None = None) -> bytes:
        return forms.encoded(self.index, id, self.sample(id, fetched))

    def close(self) -> None:
        self.cache.close()
