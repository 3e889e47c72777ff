"""Read the bytes of files by path, from the first tier that has them, for scripts without sample ids.

The tiers are servers that all nodes share, or a pack on the node, in encoded form, and then the files. Any
failure in a tier is a miss and is counted.
"""

import bisect
import os
import urllib.parse
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np

from common.exits import BadInput
from datasets.compat.kspeed.shared_counts import SharedCounts
from datasets.folders import image_folder
from datasets.folders.listing import SPLITS
from datasets.stores import pack
from datasets.stores.files import FileStore, is_scanned
from datasets.stores.shared import address

if TYPE_CHECKING:  # a pack or the files need no redis-py
    from datasets.stores.shared.servers import Servers
    from datasets.stores.tiers import Tiers

_CURE = (
    "the users {} and default were tried: pass a user and a password that it knows, or None, None if it has "
    f"neither; a password in the environment ({address.PASSWORD}) replaces that of the call"
)
_handed_on: list[str | None] = [None]  # the password that this process has put into its environment


class ByPath:
    """The files below a folder of class folders, or of a data set with splits.

    place: "host[:port],...", a URL of servers, a folder of packs that begins with "/", or "": a pack in this
        node's memory or on its disk.
    user, password: of the servers. A user in the URL and a password in the environment have priority. If a
        server refuses the user, the user default is tried.
    mode: "active" or "offline".
    cache_dir: for the index.
    max_bad: share of images that may be bad; they are read from the folder.
    log: called with one line of text.
    `indexes`: of the splits; empty if they cannot be made for the `reason`.

    Threads may share it. Workers may get it by fork or pickle; a pickle does not contain the password. Raises
    BadInput if an argument is wrong, or if a server refuses the user or the password.
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
        log: Callable[[str], None],
    ):
        self.root = os.path.abspath(root)
        if not os.path.isdir(self.root):
            raise BadInput(f"{self.root} does not exist or is not a folder")
        self.indexes: list[image_folder.ImageFolderIndex] = []
        self.reason: BadInput | None = None
        self._tiers: list[_Shared | _Packed | None] = []
        self._reads = SharedCounts("hits", "misses", "bad", "errors")
        opened = []
        self._finalizer = weakref.finalize(self, _close, opened, os.getpid())
        servers = None
        if place and not place.startswith("/"):
            from datasets.stores.shared.servers import Servers

            _hand_on(password)
            where = _address(place, user)
            servers = Servers(where, log, *([_CURE.format(user)] if where.or_default else []))
            opened.append(servers)
        try:
            self.indexes = _scanned(self.root, cache_dir, max_bad)
        except BadInput as error:
            self.reason = error
            log(f"{error}; the files are read without a cache")
        for index in self.indexes:
            image_folder.warn_of_names(index, image_folder.one_line(log))
            self._tiers.append(_tier(index, servers, place, mode, log, opened, self._reads))

    def read(self, paths: list[str]) -> list[bytes]:
        """Return the bytes of files by their absolute paths. Raises OSError."""
        found: list[bytes | None] = [None] * len(paths)
        asked = 0
        for index, tier in zip(self.indexes, self._tiers, strict=True):
            ids = {place: id for place, path in enumerate(paths) if (id := _id(index, path)) is not None}
            if tier and ids:
                asked += len(ids)
                for place, content in zip(ids, tier.contents(list(ids.values())), strict=True):
                    found[place] = content
        if asked < len(paths):
            self._reads.add(misses=len(paths) - asked)
        return [_read_file(path) if each is None else each for path, each in zip(paths, found, strict=True)]

    def size(self, path: str) -> int:
        """Return the size in bytes of the file with this absolute path. Raises OSError."""
        for index in self.indexes:
            if (id := _id(index, path)) is not None:
                return int(index.bytes[id])
        return os.path.getsize(path)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of reads that were hits, misses, bad (damaged in the cache) and errors. They include this
        process and all its workers."""
        return self._reads.read()

    def close(self) -> None:
        """Release the tiers. Without this call the end of the process releases them. Files stay readable."""
        self._tiers = [None] * len(self.indexes)
        self._finalizer()

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_finalizer"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._finalizer = weakref.finalize(self, _close, [], os.getpid())


def _read_file(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


class _Shared:
    """The contents of files, read from a Tiers."""

    def __init__(self, tiers: "Tiers"):
        self._tiers = tiers

    def contents(self, ids: list[int]) -> list[bytes | None]:
        """Return the contents; None for a file that has changed since the scan."""
        try:
            return cast("list[bytes | None]", self._tiers.read(np.array(ids)))  # their form is encoded
        except BadInput:
            return [None] if len(ids) == 1 else [self.contents([id])[0] for id in ids]


class _Packed:
    """The contents of files, read from a pack."""

    def __init__(self, store: pack.PackStore, reads: SharedCounts):
        self._store, self._reads = store, reads

    def contents(self, ids: list[int]) -> list[bytes | None]:
        """Return the contents; None for a file whose copy in the pack is damaged."""
        counts = {"hits": 0, "bad": 0, "errors": 0}
        found = [self._content(id, counts) for id in ids]
        self._reads.add(**counts)
        return found

    def _content(self, id: int, counts: dict[str, int]) -> bytes | None:
        try:
            content = bytes(self._store.sample(id).content)
        except (BadInput, LookupError, ValueError):
            counts["errors"] += 1
            return None
        if not is_scanned(self._store.index, id, content):
            counts["bad"] += 1
            return None
        counts["hits"] += 1
        return content


def _scanned(root: str, cache: str, max_bad: float) -> list[image_folder.ImageFolderIndex]:
    """Return the indexes of a folder's splits, or of the folder itself. Raises BadInput."""

    def has(name: str) -> bool:
        path = os.path.join(root, name)
        return os.path.isdir(path) or os.path.isfile(f"{path}.txt")

    splits = [split for split, names in SPLITS.items() if any(map(has, names))]
    if not splits:  # the split's name in its data set, so that the data set's pack is found
        splits = ["val" if os.path.basename(root) in SPLITS["val"] else "train"]
    found: list[image_folder.ImageFolderIndex] = []
    for split in splits:
        classes = found[0].classes if found else None
        found.append(image_folder.load(root, split, cache, max_bad, classes, lambda text: None, val_share=0))
    return found


def _tier(
    index: image_folder.ImageFolderIndex,
    servers: "Servers | None",
    place: str,
    mode: str,
    log: Callable[[str], None],
    opened: list,
    reads: SharedCounts,
) -> _Shared | _Packed | None:
    """Return the tier with the contents of an index's files, or None.

    opened: list to which objects with close() are appended. reads: counters of the reads.
    """
    if servers:
        from datasets.stores.shared.redis import RedisStore
        from datasets.stores.tiers import Tiers

        cache = RedisStore(servers, index, mode, "encoded", reads)
        opened.append(Tiers(cache, FileStore(index, verified=True)))
        return _Shared(opened[-1])
    if place:
        try:
            return _Packed(pack.build(index, pack.place(place, index, "encoded"), "encoded"), reads)
        except BadInput as error:
            log(f"{error}; the files are read without it")
            return None
    from datasets.stores.local import Local

    opened.append(Local(index, mode, log, form="encoded"))
    return _Packed(opened[-1].store, reads) if opened[-1].store else None


def _id(index: image_folder.ImageFolderIndex, path: str) -> int | None:
    """Return the id of a path, None if it is not in the index. An index has its paths in order."""
    id = bisect.bisect_left(range(len(index)), path, key=index.path)
    return id if id < len(index) and index.path(id) == path else None


def _address(place: str, user: str | None) -> address.Address:
    scheme, found, rest = place.replace(" ", "").partition("://")
    if not found:
        scheme, rest = "redis", scheme
    given = bool(user) and "@" not in rest
    if user and given:
        rest = f"{urllib.parse.quote(user, safe='')}@{rest}"
    return address.parse(f"{scheme}://{rest}")._replace(or_default=given)


def _hand_on(password: str | None) -> None:
    """Put the password into the environment, which workers inherit. A pickle may be stored on a disk."""
    known = os.environ.get(address.PASSWORD)
    if password and not os.environ.get(address.PASSWORD_FILE) and known in (None, "", _handed_on[0]):
        os.environ[address.PASSWORD] = _handed_on[0] = password


def _close(opened: list, pid: int) -> None:
    """Close the objects in reverse order, only in the process that opened them."""
    if os.getpid() == pid:
        while opened:
            opened.pop().close()
