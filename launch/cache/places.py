"""The two places of samples, a folder of packs and a server, and how their samples are compared with files.

A place takes an index and a form, stores its samples, and gives a function that reads them. check() compares
every sample with its file, byte for byte. All state of a server is on it: a preload that was killed, or that
lost its server, stores only the missing samples when it is started again. SET is atomic, so the length of a
value shows whether the sample is stored.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from bootfile.ground.errors import BadInput
from datasets.folders import image_folder
from datasets.folders.image_folder import ImageFolderIndex
from datasets.folders.walk import progress, shown
from datasets.stores import connection, forms, pack, redis_store
from datasets.stores.connection import Server
from datasets.stores.files import FileStore
from datasets.stores.redis_store import RedisStore, StoredSet
from launch.explain import align

MISSING = "missing"
DAMAGED = "damaged"
DIFFERENT = "different"
KINDS = (MISSING, DAMAGED, DIFFERENT)
Read = Callable[[np.ndarray], list]  # ids -> samples, or MISSING, or DAMAGED
_COMPARED = 256  # samples that a thread compares at a time


def check(read: Read, index: image_folder.ImageFolderIndex, form: str, workers: int) -> int:
    """Compare the samples of a split, print the result, and return the number of wrong ones. Raises BadInput
    if a file cannot be read or was changed since the scan."""
    files = FileStore(index, verified=True)
    paths_of: dict[str, list[str]] = {kind: [] for kind in KINDS}
    parts = np.split(np.arange(len(index)), range(_COMPARED, len(index), _COMPARED))
    with progress(len(index), f"checking {index.split}") as bar:

        def compare(part: np.ndarray) -> list[tuple[str, int]]:
            """Return (kind, id) of the wrong samples among these ids, in a thread of the pool."""
            wrong = []
            for id, kept in zip(part.tolist(), read(part), strict=True):
                if isinstance(kept, str):
                    wrong.append((kept, id))
                elif not _same(kept, forms.make(files, id, form)):
                    wrong.append((DIFFERENT, id))
            return wrong

        # the threads read and decode; this one counts, in the order of the ids
        for part, wrong in zip(parts, _map(compare, parts, workers), strict=True):
            for kind, id in wrong:
                paths_of[kind].append(index.path(id))
            bar.update(len(part))
    tell = image_folder.one_line(print)
    wrong_paths = {kind: paths for kind, paths in paths_of.items() if paths}
    for kind, paths in wrong_paths.items():
        tell(f"{kind}: {shown(paths)}")
    count = sum(map(len, paths_of.values()))
    counts = "".join(f", {len(paths)} {kind}" for kind, paths in wrong_paths.items())
    equal = f"{len(index) - count} of {len(index)} samples are stored and equal to the files"
    print(f"{index.split}: {equal}{counts}", flush=True)
    return count


def _map(function: Callable, parts: list[np.ndarray], workers: int) -> Iterator:
    """Yield the results of a function for each part, in order, computed in threads."""
    pool = ThreadPoolExecutor(workers, "cache")
    try:
        yield from pool.map(function, parts)
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, or Ctrl-C


def _same(kept: bytes | np.ndarray, made: forms.Sample) -> bool:
    """Return whether a stored sample has the size and the bytes of one that was just made from the file."""
    has_size = not isinstance(kept, np.ndarray) or kept.shape[:2] == made[:2]
    return has_size and np.array_equal(np.frombuffer(kept, np.uint8), np.frombuffer(made.content, np.uint8))


class Packs:
    """A folder of packs, for one run of `launch cache`. log: called with one line to print.

    form: of the samples if none is named. forms: those that it can hold.
    """

    form = "decoded"
    forms = forms.FORMS

    def __init__(self, folder: str, log: Callable[[str], object]):
        self.folder = os.path.abspath(folder)
        self._log = log

    def close(self) -> None:
        """Do nothing: the verbs close a place at their end, and only a server has a connection."""

    def preload(self, index: ImageFolderIndex, form: str, workers: int) -> int:
        """Make the pack if it is missing, and return the number of samples. Raises BadInput, also if there is
        not enough space."""
        pack.build(index, pack.place(self.folder, index, form), form, threads=workers).close()
        return len(index)

    @contextlib.contextmanager
    def reader(self, index: ImageFolderIndex, form: str) -> Iterator[Read]:
        """Yield read(ids) -> list of bytes (encoded), uint8 [height, width, 3], MISSING or DAMAGED."""
        path = pack.place(self.folder, index, form)
        is_whole = pack.is_whole(index, path, form)
        store = pack.PackStore(path, index, form)
        if not is_whole:
            self._log(f"{index.split}: no whole pack at {path}; `preload` makes its missing parts")

        def read_one(id: int) -> bytes | np.ndarray | str:
            if not is_whole:
                return MISSING
            try:
                return store.stored(id)[0].value(form)
            except (BadInput, LookupError, ValueError):
                return DAMAGED

        def read(ids: np.ndarray) -> list:
            """Return the samples: the threads of check() call it."""
            return [read_one(id) for id in ids.tolist()]

        yield read


_PART = 32  # samples that a thread makes and sends at a time


class Shared:
    """The server of a URL, for one run of `launch cache`. log: called with one line to print.

    server: the connection. form: of the samples, as the URL names it.

    Raises BadInput if the server does not answer at the start, later Unavailable.
    """

    forms = forms.SIZED  # the size of a value shows whether it is complete

    def __init__(self, url: str, log: Callable[[str], None]):
        self._log = log
        self._opened = False  # whether the server has answered once
        try:
            self.server = Server(connection.parse(url), self._log_later)
        except BadInput as error:
            raise BadInput(str(error).replace("--cache", "--to")) from None
        self.form = self.server.address.form
        # a job continues without the cache; here there is nothing else to do
        if self.server.down:
            self.close()
            raise BadInput(f"cache {self.server.address}: {self.server.down}")
        self._opened = True

    def close(self) -> None:
        """Close the connection: at the end of each verb, also after an error."""
        self.server.close()

    def preload(self, index: ImageFolderIndex, form: str, workers: int) -> int:
        """Store the missing samples permanently. Return the number of stored samples: fewer than all if the
        server is full or was lost. Raises Unavailable, or BadInput if a file was changed since the scan."""
        with contextlib.closing(RedisStore(self.server, index, "", form)) as store:
            missing = self._find_missing(store)
            count = len(index) - len(missing)
            self._log(f"{index.split}: {count} of {len(index)} samples are stored already")
            if not len(missing):
                return count
            with progress(len(index), f"preloading {index.split}") as bar:
                bar.update(count)
                self._send(store, missing, workers, bar)
            return len(index) - len(self._find_missing(store))

    @contextlib.contextmanager
    def reader(self, index: ImageFolderIndex, form: str) -> Iterator[Read]:
        """Yield read(ids) -> list of bytes (encoded), uint8 [height, width, 3], MISSING or DAMAGED."""

        def read(ids: np.ndarray) -> list[bytes | np.ndarray | str | None]:
            """Return the samples: the threads of check() call it."""
            samples: list[bytes | np.ndarray | str | None] = [*store.read(ids)]
            # a miss may be a missing or a damaged sample: its length tells which
            lost = [place for place, sample in enumerate(samples) if sample is None]
            for place, length in zip(lost, store.lengths(ids[lost]), strict=True):
                samples[place] = DAMAGED if length else MISSING
            return samples

        with contextlib.closing(RedisStore(self.server, index, "", form)) as store:
            yield read

    def find(self, text: str) -> list[StoredSet]:
        """Return the data sets whose names begin with `text`: exactly one, or all for "". Raises BadInput."""
        stored = redis_store.list_sets(self.server)
        matching = [data_set for data_set in stored if data_set.name.startswith(text)]
        if text and len(matching) != 1:
            names = ", ".join(data_set.name for data_set in matching or stored) or "nothing"
            raise BadInput(f"{text!r} matches {len(matching)} data sets; stored: {names}")
        return matching

    def describe(self) -> str:
        """Return a table with one line for each data set, a line for each user, and one about the memory."""
        rows = [("name", "data set", "form", "samples", "GB", "mode", "users")]
        users = []
        for stored in redis_store.list_sets(self.server):
            name = stored.name
            with progress(stored.samples, f"counting {name}") as bar:
                ids = np.arange(stored.samples)
                lengths = redis_store.send_redis_command(self.server, name, "STRLEN", ids, bar.update)
            samples = f"{(lengths > 0).sum()}/{stored.samples}"
            size = f"{lengths.clip(0).sum() / 1e9:.3f}"
            form = name.partition(":")[2]
            count = str(len(stored.references))
            rows.append((name, stored.title, form, samples, size, stored.mode, count))
            users += [f"{name} is used by {user}" for user in stored.users]
        return "\n".join(filter(None, [*align(rows), *users, self._describe_room()]))

    def _describe_room(self) -> str:
        """Return a line about the memory of the server (of a Cluster: one node); "" if it is unknown."""
        memory = self.server.memory()
        if not memory:
            return ""
        limit = memory.get("maxmemory")
        note = memory.get("maxmemory_policy", "")
        # with another policy the server deletes samples to make room: jobs would read their files
        if limit and note != "noeviction":
            note += ": set it to noeviction"
        most = f"{limit / 1e9:.3f} GB" if limit else "no limit"
        used = f"{memory.get('used_memory', 0) / 1e9:.3f} GB used of {most}"
        return ", ".join(filter(None, [f"{self.server.address}: {used}", note]))

    def _log_later(self, text: str) -> None:
        """Print what the connection reports once it is open."""
        if self._opened:  # failures at the start are reported as errors
            self._log(text)

    def _find_missing(self, store: RedisStore) -> np.ndarray:
        """Return the ids of samples that are missing or have the wrong length. Make the other samples
        permanent. Raises Unavailable."""
        ids = np.arange(len(store.index))
        if not self.server.full_until:  # a full server refuses it
            store.reference.register(offline=True)
        # samples that an active job has put would expire
        redis_store.send_redis_command(self.server, store.name, "PERSIST", ids)
        with progress(len(ids), "counting stored samples") as bar:
            return ids[store.lengths(ids, bar.update) != store.whole_lengths(ids)]

    def _send(self, store: RedisStore, ids: np.ndarray, workers: int, bar: tqdm) -> None:
        """Make and store samples, until the server is full or down."""
        files = FileStore(store.index, verified=True)

        def send(part: np.ndarray) -> int:
            """Make and store samples in a thread of the pool. Return how many were stored."""
            # a full server takes no more, and a lost one neither: the next preload stores the rest
            if self.server.full_until or self.server.down:
                return 0
            return store.put(part, [forms.make(files, id, store.form) for id in part.tolist()])

        for taken in _map(send, np.split(ids, range(_PART, len(ids), _PART)), workers):
            bar.update(taken)
