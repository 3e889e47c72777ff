"""Store, read, list and delete data sets on the servers of a shared cache.

All state is on the servers. A preload that was killed, or whose server has lost its data, stores only the
missing samples. SET is atomic, so the length of a value shows whether the sample is stored; `check` compares
bytes.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from common.exits import BadInput
from datasets.folders.image_folder import ImageFolderIndex
from datasets.folders.listing import progress
from datasets.stores import forms
from datasets.stores.files import FileStore
from datasets.stores.shared import address, leases
from datasets.stores.shared.redis import RedisStore
from datasets.stores.shared.servers import Servers, Unavailable
from launch.cache.check import DAMAGED, MISSING
from launch.cache.sets import DataSet, Read, Room

_ROUNDS = 5  # attempts to send missing samples, also if a server is lost repeatedly
PATIENCE = 30.0  # seconds to wait for a lost server: a managed one fails over
_SAMPLES = 32  # samples that a thread makes and sends at a time


class Shared:
    """The servers of a URL. log: called with one line to print.

    Raises BadInput if a server does not answer at the start, later Unavailable.
    """

    shared = True  # nodes share the servers: each can fill a part
    forms = forms.SIZED  # the size of a value shows whether it is complete

    def __init__(self, url: str, log: Callable[[str], None]):
        self._log, self._opened = log, False
        try:
            place = address.parse(url)
            self.servers = Servers(place, self._log_later)
        except BadInput as error:
            raise BadInput(str(error).replace("--cache", "--to")) from None
        self.form = place.form
        lost = [f"{server.name}: {server.down}" for server in self.servers if server.down]
        if lost:
            self.close()
            raise BadInput(f"cache {'; '.join(lost)}")
        self._opened = True

    def close(self) -> None:
        self.servers.close()

    def preload(
        self, index: ImageFolderIndex, form: str, short_side: int, workers: int, ids: np.ndarray
    ) -> int:
        """Store the missing samples permanently. Return the number of stored samples: fewer than ids if the
        servers are full. Raises BadInput if a file was changed since the scan."""
        _check_short_side(short_side)
        store = RedisStore(self.servers, index, "", form)
        try:
            self._warn_of_other_contents(store)
            missing = self._patiently(lambda: self._missing(store, ids))
            self._log(f"{index.split}: {len(ids) - len(missing)} of {len(ids)} samples are stored already")
            self._warn_of_room(int(store.whole_lengths(missing).sum()))
            # Without a terminal, print a line every 10 s, so that a long preload does not look like a hang.
            with tqdm(
                total=len(ids), initial=len(ids) - len(missing), desc=f"preloading {index.split}",
                unit="image", mininterval=10 * (not os.isatty(2)) or 0.1,
            ) as bar:  # fmt: skip
                for _ in range(_ROUNDS):
                    if not len(missing) or any(server.full_pause for server in self.servers):
                        break
                    self._send(store, missing, workers, bar)
                    missing = self._patiently(lambda: self._missing(store, ids))
                    bar.n = len(ids) - len(missing)
            return len(ids) - len(missing)
        finally:
            store.close()

    @contextlib.contextmanager
    def reader(self, index: ImageFolderIndex, form: str, short_side: int) -> Iterator[Read]:
        """Yield read(ids) -> list of bytes (encoded), uint8 [height, width, 3], MISSING or DAMAGED."""
        _check_short_side(short_side)
        store = RedisStore(self.servers, index, "", form)

        def read(ids: np.ndarray) -> list[bytes | np.ndarray | str | None]:
            found: list[bytes | np.ndarray | str | None] = [*store.read(ids)]
            lost = [place for place, sample in enumerate(found) if sample is None]
            again = store.read(ids[lost])  # a key that moved between nodes answers the second time
            for place, sample, length in zip(lost, again, store.lengths(ids[lost]), strict=True):
                found[place] = (DAMAGED if length else MISSING) if sample is None else sample
            return found

        try:
            yield read
        finally:
            store.close()

    def sets(self, counted: bool = True) -> list[DataSet]:
        """Return the data sets. counted: count the stored samples."""
        found = []
        for each in leases.held(self.servers):
            fingerprint, _, label = each.name.partition(":")
            there = size = None
            if counted:
                with progress(each.samples, f"counting {each.name}") as bar:
                    ids = np.arange(each.samples)
                    lengths = leases.ask(self.servers, each.name, "STRLEN", ids, bar.update)
                there, size = int((lengths > 0).sum()), int(lengths.clip(0).sum())
            known = (each.name, fingerprint, each.title, label, each.samples, there, size, each.mode)
            found.append(DataSet(*known, each.leases, each.counts))
        return found

    def remove(self, each: DataSet) -> None:
        with progress(each.samples, f"removing {each.name}") as bar:
            leases.remove(self.servers, each.name, bar.update)

    def rooms(self) -> list[Room]:
        """Return the memory of the servers that report it."""
        found = []
        for server in self.servers:
            if known := server.memory():
                limit, policy = known.get("maxmemory") or None, known.get("maxmemory_policy", "")
                note = policy if policy == "noeviction" or not limit else f"{policy}: set it to noeviction"
                found.append(Room(server.name, known.get("used_memory", 0), limit, note))
        return found

    def _log_later(self, text: str) -> None:
        if self._opened:  # failures at the start are reported as errors
            self._log(text)

    def _warn_of_other_contents(self, store: RedisStore) -> None:
        title, label = store.lease.title, store.name.partition(":")[2]
        for each in leases.held(self.servers):
            if each.title == title and each.name.endswith(f":{label}") and each.name != store.name:
                self._log(f"{title} is also stored with other contents: `rm {each.name}` deletes them")

    def _warn_of_room(self, needed: int) -> None:
        rooms = self.rooms()
        free = sum(max(0, (room.limit or 0) - room.used) for room in rooms)
        if rooms and all(room.limit for room in rooms) and needed > free:
            self._log(f"{needed / 1e9:.3f} GB are to be sent, {free / 1e9:.3f} GB are free: not all will fit")

    def _missing(self, store: RedisStore, ids: np.ndarray) -> np.ndarray:
        """Return the ids of samples that are missing or have the wrong length. Make the other samples
        permanent."""
        store.lease.announce("offline")  # each time: a restarted server has lost it
        store.keep(ids)
        with progress(len(ids), "counting stored samples") as bar:
            return ids[store.lengths(ids, bar.update) != store.whole_lengths(ids)]

    def _send(self, store: RedisStore, ids: np.ndarray, workers: int, bar: tqdm) -> None:
        """Make and store samples until all servers are full. A part is sent again only after a server was
        lost."""
        files, stop = FileStore(store.index, verified=True), threading.Event()

        def send(part: np.ndarray) -> int:
            taken = 0
            for _ in range(_ROUNDS):
                if stop.is_set():
                    break
                taken = store.put(part, [forms.make(files, id, store.form) for id in part.tolist()])
                if taken == len(part):
                    break
                if all(server.full_pause for server in self.servers):
                    stop.set()
                if not self._wait_for_lost():
                    break
            return taken

        parts = [ids[first : first + _SAMPLES] for first in range(0, len(ids), _SAMPLES)]
        pool = ThreadPoolExecutor(workers, "preload")
        try:
            for taken in pool.map(send, parts):
                bar.update(taken)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)

    def _patiently(self, ask: Callable):
        """Return ask(); repeat it if a server was lost and came back. Raises Unavailable."""
        while True:
            try:
                return ask()
            except Unavailable:
                if not self._wait_for_lost():
                    raise

    def _wait_for_lost(self) -> bool:
        """Wait until all servers answer, and return whether one did not. Raises Unavailable after
        PATIENCE."""
        until, waited = time.monotonic() + PATIENCE, False
        self.servers.wake()
        while lost := [server for server in self.servers if server.down is not None]:
            if time.monotonic() > until:
                raise Unavailable("; ".join(f"{server.name}: {server.down}" for server in lost))
            waited = True
            time.sleep(0.1)
        return waited


def _check_short_side(short_side: int) -> None:
    if short_side != forms.SHORT_SIDE:
        raise BadInput(
            f"--short_side {short_side}: a shared cache has {forms.SHORT_SIDE}, packs may have others"
        )
