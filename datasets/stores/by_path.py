"""The bytes of files by their paths, from the first tier that has them, for scripts that know no ids.

The tiers are those of ids, in encoded form: servers that all nodes share, a pack on the node, the files.
Whatever fails in a tier is a miss, and counted.
"""

import bisect
import collections
import os
import urllib.parse
import weakref
import zlib

import numpy as np

from common.exits import BadInput
from datasets import image_folder
from datasets.listing import SPLITS
from datasets.stores import address, pack
from datasets.stores.files import FileStore

_handed_on = [None]  # the password that this process has put into its environment


class ByPath:
    """The files below a folder of class folders, or of a data set with splits.

    place: "host[:port],...", a URL of servers, a folder of packs that begins with "/", or "": a pack in this
    node's memory or on its disk. user, password: of the servers; what the URL or the environment says goes
    before them. mode: "active" or "offline". cache_dir: for the index. max_bad: the share of images that may
    be bad; they are read from the folder. say: takes a line of text.

    `indexes`: of the splits; none where they cannot be made, `reason` says why. Threads may share one; goes
    into worker processes, forked or pickled, without the password. Raises BadInput for arguments, and where
    a server refuses the user or the password.
    """

    def __init__(
        self,
        root: str,
        place: str,
        user: str | None,
        password: str | None,
        mode: str,
        cache_dir: str,
        max_bad: float,
        say,
    ):
        self.root = os.path.abspath(root)
        if not os.path.isdir(self.root):
            raise BadInput(f"{self.root} does not exist or is not a folder")
        self.indexes, self.reason, self._tiers, self._unasked = [], None, [], 0
        opened = []
        self._finalizer = weakref.finalize(self, _close, opened, os.getpid())
        servers = None
        if place and not place.startswith("/"):
            from datasets.stores.servers import Servers

            _hand_on(password)
            servers = Servers(_address(place, user), say)
            opened.append(servers)
        try:
            self.indexes = _scanned(self.root, cache_dir, max_bad)
        except BadInput as error:
            self.reason = error
            say(f"{error}; the files are read without a cache")
        for index in self.indexes:
            image_folder.warn_of_names(index, image_folder.one_line(say))
            self._tiers.append(_tier(index, servers, place, mode, say, opened))

    def read(self, paths: list[str]) -> list[bytes]:
        """What lies under absolute paths, asked for together. Raises OSError."""
        found: list[bytes | None] = [None] * len(paths)
        asked = 0
        for index, tier in zip(self.indexes, self._tiers, strict=True):
            ids = {place: id for place, path in enumerate(paths) if (id := _id(index, path)) is not None}
            if tier and ids:
                asked += len(ids)
                for place, content in zip(ids, tier.contents(list(ids.values())), strict=True):
                    found[place] = content
        self._unasked += len(paths) - asked
        for place, path in enumerate(paths):
            if found[place] is None:
                with open(path, "rb", buffering=0) as file:
                    found[place] = file.read()
        return found

    def size(self, path: str) -> int:
        """Bytes of the file under an absolute path. Raises OSError."""
        for index in self.indexes:
            if (id := _id(index, path)) is not None:
                return int(index.bytes[id])
        return os.path.getsize(path)

    @property
    def counts(self) -> dict[str, int]:
        """hits, misses, bad (not what was put) and errors, of this process."""
        total = collections.Counter(hits=0, misses=self._unasked, bad=0, errors=0)
        for tier in filter(None, self._tiers):
            total.update({name: number for name, number in tier.counts.items() if name in total})
        return dict(total)

    def close(self) -> None:
        """Let go of the tiers; else the end of the process does. The files can still be read."""
        self._tiers = [None] * len(self.indexes)
        self._finalizer()

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_finalizer"} | {"_unasked": 0}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._finalizer = weakref.finalize(self, _close, [], os.getpid())


class _Shared:
    """Of a Tiers."""

    def __init__(self, tiers):
        self._tiers = tiers

    def contents(self, ids: list[int]) -> list[bytes | None]:
        """None where the file is another one now."""
        return [
            self._content(id, fetched)
            for id, fetched in zip(ids, self._tiers.fetch(np.array(ids)), strict=True)
        ]

    def _content(self, id: int, fetched: np.ndarray | None) -> bytes | None:
        try:
            return bytes(self._tiers.sample(id, fetched).content)
        except BadInput:
            return None

    @property
    def counts(self) -> dict[str, int]:
        return self._tiers.cache.counts


class _Packed:
    """Of a pack."""

    def __init__(self, store: pack.PackStore):
        self._store, self.counts = store, collections.Counter()

    def contents(self, ids: list[int]) -> list[bytes | None]:
        """None where the pack is damaged."""
        return [self._content(id) for id in ids]

    def _content(self, id: int) -> bytes | None:
        try:
            content = bytes(self._store.sample(id).content)
        except (BadInput, LookupError, ValueError):
            self.counts["errors"] += 1
            return None
        if zlib.crc32(content) != self._store.index.crc32[id]:
            self.counts["bad"] += 1
            return None
        self.counts["hits"] += 1
        return content


def _scanned(root: str, cache: str, max_bad: float) -> list[image_folder.Index]:
    """Of the splits that a folder has, or of the folder itself. Raises BadInput."""

    def has(name: str) -> bool:
        path = os.path.join(root, name)
        return os.path.isdir(path) or os.path.isfile(f"{path}.txt")

    splits = [split for split, names in SPLITS.items() if any(map(has, names))]
    if not splits:  # named as it is in its data set, so that a pack that was made for that is found
        splits = ["val" if os.path.basename(root) in SPLITS["val"] else "train"]
    found = []
    for split in splits:
        classes = found[0].classes if found else None
        found.append(image_folder.load(root, split, cache, max_bad, classes, lambda text: None))
    return found


def _tier(index, servers, place: str, mode: str, say, opened: list):
    """What gives the contents of an index's files, or None. opened: takes what is to be closed."""
    if servers:
        from datasets.stores.redis import RedisStore
        from datasets.stores.tiers import Tiers

        opened.append(Tiers(RedisStore(servers, index, mode, "encoded"), FileStore(index, verified=True)))
        return _Shared(opened[-1])
    if place:
        try:
            return _Packed(pack.build(index, pack.place(place, index, "encoded"), "encoded"))
        except BadInput as error:
            say(f"{error}; the files are read without it")
            return None
    from datasets.stores.local import Local

    opened.append(Local(index, mode, say, form="encoded"))
    return _Packed(opened[-1].store) if opened[-1].store else None


def _id(index, path: str) -> int | None:
    """An index has its paths in order."""
    id = bisect.bisect_left(range(len(index)), path, key=index.path)
    return id if id < len(index) and index.path(id) == path else None


def _address(place: str, user: str | None) -> address.Address:
    scheme, found, rest = place.replace(" ", "").partition("://")
    if not found:
        scheme, rest = "redis", scheme
    if user and "@" not in rest:
        rest = f"{urllib.parse.quote(user, safe='')}@{rest}"
    return address.parse(f"{scheme}://{rest}")


def _hand_on(password: str | None) -> None:
    """Worker processes inherit the environment; a pickle may lie on a disk."""
    known = os.environ.get(address.PASSWORD)
    if password and not os.environ.get(address.PASSWORD_FILE) and known in (None, "", _handed_on[0]):
        os.environ[address.PASSWORD] = _handed_on[0] = password


def _close(opened: list, pid: int) -> None:
    """By the process that opened it, the last one first."""
    if os.getpid() == pid:
        while opened:
            opened.pop().close()
