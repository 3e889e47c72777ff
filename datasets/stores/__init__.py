"""Where a sample's bytes come from, by id.

A store has `form`, "encoded" or "decoded"; image(id, scratch) -> uint8 [height, width, 3], perhaps smaller
than the index says; encoded(id) -> bytes where the form is "encoded"; and close(). Threads may share one. One
that is far away has fetch(ids), too: what comes of it goes to image() and encoded() as a last argument.
"""

from common.exits import BadInput

MODES = ("active", "offline")


class Stores:
    """Opens the store of each data set of a job: the first that is there of a pack on the node, a shared
    cache and the files, or what is below a URL.

    folder: of packs, or None. cache: the URL of a shared cache (address.py), or None. mode: "active" or
    "offline" (redis.py). local: without both, a pack in the node's memory or on its disk. say: takes a line
    of text. Raises BadInput for what the arguments name wrongly, and as the stores do.
    """

    def __init__(self, folder: str | None, cache: str | None, mode: str, local: bool, say=print):
        self.folder, self.mode, self.local, self._say = folder, mode, local, say
        self._servers, self._opened, self._known = None, [], {}
        if cache:
            from datasets.stores.shared import address
            from datasets.stores.shared.servers import Servers

            self._servers = Servers(address.parse(cache), say)

    def open(self, index):
        """The store of an image_folder.Index, the same one for the same index; closed with this."""
        if index.fingerprint not in self._known:
            self._known[index.fingerprint] = self._open(index)
        return self._known[index.fingerprint]

    def _open(self, index):
        from datasets.stores import pack
        from datasets.stores.files import origin

        files = source = self._kept(origin(index))
        if self._servers:
            from datasets.stores.shared.redis import RedisStore
            from datasets.stores.tiers import Tiers

            cached = RedisStore(self._servers, index, self.mode)
            source = self._kept(Tiers(cached, files))
            if self.mode == "offline" and cached.is_empty():
                self._say(f"the cache holds nothing of {cached.name}: --cache_mode offline needs a preload")
        if self.folder:
            tiers = source if source is not files and source.form == "decoded" else None
            try:
                return self._kept(pack.build(index, pack.place(self.folder, index), source=tiers))
            except BadInput as error:
                if not self._servers:
                    raise
                self._say(f"{error}; the cache is used without it")
        elif self.local and not self._servers:
            from datasets.stores.local import Local

            return self._kept(Local(index, self.mode, self._say)).store or files
        return source

    def close(self) -> None:
        """Let go: the last one takes away what is not to stay."""
        for each in self._opened:
            each.close()
        if self._servers:
            self._servers.close()

    def _kept(self, store):
        self._opened.append(store)
        return store
