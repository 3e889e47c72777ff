"""The data sets on the servers of a shared cache, looked after: filled, read back, counted, taken away.

What is there is asked of the servers, never remembered here: a preload that was killed, or whose server was
started anew, goes on with what is missing. Values appear whole or not at all (SET), so a length says enough
to go on; `check` compares bytes.
"""

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from common.exits import BadInput
from datasets.folders.listing import progress
from datasets.stores import forms
from datasets.stores.files import FileStore
from datasets.stores.forms import Sample
from datasets.stores.shared import address, leases, wire
from datasets.stores.shared.redis import RedisStore
from datasets.stores.shared.servers import GROUPS, TAGS, Servers, Unavailable
from launch.cache.check import DAMAGED, MISSING
from launch.cache.sets import DataSet, Room

_ROUNDS = 5  # of sending what is still missing, or of sending it again to a server that comes and goes
PATIENCE = 30.0  # seconds for a server that was lost in the middle to come back: a managed one fails over
_TOGETHER = 32  # samples a thread makes and sends at a time
_ASKED = 5_000  # samples between two moves of a bar


class Shared:
    """The servers that a URL names: all of them answer, else it raises BadInput. say: takes a line of text.

    Whatever is asked of a server that has gone raises Unavailable.
    """

    shared = True  # by nodes, who can each fill a part

    def __init__(self, url: str, say):
        self._say, self._heard = say, False
        try:
            place = address.parse(url)
            self.servers = Servers(place, self._hear)
        except BadInput as error:
            raise BadInput(str(error).replace("--cache", "--to")) from None
        self.form = place.form
        lost = [f"{server.name}: {server.down}" for server in self.servers if server.down]
        if lost:
            self.close()
            raise BadInput(f"cache {'; '.join(lost)}")
        self._heard = True

    def close(self) -> None:
        self.servers.close()

    def preload(self, index, form: str, short_side: int, workers: int, ids: np.ndarray) -> int:
        """Put the samples that are not there, for everybody and to stay. Returns how many are in then: fewer
        than ids where the servers take no more. Raises BadInput where a file was changed since the scan."""
        _checked(short_side)
        store = RedisStore(self.servers, index, "", form)
        files = FileStore(index, verified=True)
        try:
            self._warn(store)
            self._patiently(lambda: store.lease.announce("offline"))
            missing = self._patiently(lambda: self._missing(store, ids))
            self._say(f"{index.split}: {len(ids) - len(missing)} of {len(ids)} samples are there")
            self._warn_of_room(store, missing)
            # Not a terminal: one line every 10 s, so that a long preload is not taken for a hang.
            with tqdm(
                total=len(ids), initial=len(ids) - len(missing), desc=f"preloading {index.split}",
                unit="image", mininterval=10 * (not os.isatty(2)) or 0.1,
            ) as bar:  # fmt: skip
                for _ in range(_ROUNDS):
                    if not len(missing) or any(server.full_pause for server in self.servers):
                        break
                    self._send(store, files, missing, workers, bar)
                    missing = self._patiently(lambda: self._missing(store, ids))
                    bar.n = len(ids) - len(missing)
            self._patiently(lambda: store.lease.announce("offline"))  # a server that began anew has forgotten
            return len(ids) - len(missing)
        finally:
            store.close()

    @contextlib.contextmanager
    def reader(self, index, form: str, short_side: int):
        """read(ids) -> list[Sample | MISSING | DAMAGED], for threads."""
        _checked(short_side)
        store = RedisStore(self.servers, index, "", form)

        def read(ids: np.ndarray) -> list[Sample | str]:
            found = store.get(ids)
            lost = [place for place, sample in enumerate(found) if sample is None]
            if lost:  # a key that was moving from node to node answers the second time
                for place, sample in zip(lost, store.get(ids[lost]), strict=True):
                    found[place] = sample
                for place, length in zip(lost, self._lengths(store.name, ids[lost]), strict=True):
                    if found[place] is None:
                        found[place] = DAMAGED if length else MISSING
            return found

        try:
            yield read
        finally:
            store.close()

    def sets(self, counted: bool = True) -> list[DataSet]:
        """What is there. counted: ask for every sample."""
        found = []
        for each in leases.held(self.servers):
            fingerprint, _, label = each.name.partition(":")
            there = size = None
            if counted:
                with progress(each.samples, f"looking at {each.name}") as bar:
                    lengths = self._lengths(each.name, np.arange(each.samples), bar.update)
                there, size = int((lengths > 0).sum()), int(lengths.clip(0).sum())
            known = (each.name, fingerprint, each.title, label, each.samples, there, size, each.mode)
            found.append(DataSet(*known, [tuple(lease) for lease in each.leases], each.counts))
        return found

    def remove(self, each: DataSet) -> None:
        with progress(each.samples, f"removing {each.name}") as bar:
            leases.remove(self.servers, each.name, bar.update)

    def rooms(self) -> list[Room]:
        """Of those that tell."""
        found = []
        for server in self.servers:
            answer = server.execute(("INFO", "memory"))[0]
            if isinstance(answer, wire.Refused):
                continue
            lines = (line.split(":", 1) for line in answer.decode().splitlines() if ":" in line)
            known = dict(lines)
            limit, policy = int(known.get("maxmemory", 0)) or None, known.get("maxmemory_policy", "")
            note = policy if policy == "noeviction" or not limit else f"{policy}: set it to noeviction"
            found.append(Room(server.name, int(known.get("used_memory", 0)), limit, note))
        return found

    def _hear(self, text: str) -> None:
        if self._heard:  # what fails at the start is an error of its own
            self._say(text)

    def _warn(self, store: RedisStore) -> None:
        title, label = store.lease.title, store.name.partition(":")[2]
        for each in leases.held(self.servers):
            if each.title == title and each.name.endswith(f":{label}") and each.name != store.name:
                self._say(f"{title} is there with other contents, too, as {each.name}: rm takes it away")

    def _warn_of_room(self, store: RedisStore, missing: np.ndarray) -> None:
        needed = int(store.whole(missing).sum())
        rooms = self.rooms()
        if rooms and all(room.limit for room in rooms):
            free = sum(max(0, room.limit - room.used) for room in rooms)
            if needed > free:
                self._say(
                    f"{needed / 1e9:.3f} GB are to be sent, {free / 1e9:.3f} GB are free: not all will fit"
                )

    def _missing(self, store: RedisStore, ids: np.ndarray) -> np.ndarray:
        """Those that are not there, or have another length than they must. The others stay from now on."""
        store.keep(ids)
        lengths = np.empty(0, np.int64)
        if len(ids):
            with progress(len(ids), "looking for what is there") as bar:
                lengths = self._lengths(store.name, ids, bar.update)
        return ids[lengths != store.whole(ids)]

    def _send(self, store: RedisStore, files: FileStore, ids: np.ndarray, workers: int, bar: tqdm) -> None:
        """Make samples and put them, each at most once, until all servers are full."""
        stop = threading.Event()

        def send(part: np.ndarray) -> int:
            taken = 0
            for _ in range(_ROUNDS):
                if stop.is_set():
                    break
                samples = [forms.make(files, id, store.form) for id in part.tolist()]
                taken = store.put(part, samples)
                if taken == len(part):
                    break
                if all(server.full_pause for server in self.servers):
                    stop.set()
                if not self._wait_for_lost():
                    break
            return taken

        parts = [ids[first : first + _TOGETHER] for first in range(0, len(ids), _TOGETHER)]
        pool = ThreadPoolExecutor(workers, "preload")
        try:
            for taken in pool.map(send, parts):
                bar.update(taken)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)

    def _patiently(self, ask):
        """ask(), again where a server was lost and came back. Raises Unavailable."""
        while True:
            try:
                return ask()
            except Unavailable:
                if not self._wait_for_lost():
                    raise

    def _wait_for_lost(self) -> bool:
        """Until all servers answer; False where all do. Raises Unavailable after PATIENCE."""
        until, waited = time.monotonic() + PATIENCE, False
        self.servers.wake()
        while lost := [server for server in self.servers if server.down is not None]:
            if time.monotonic() > until:
                raise Unavailable("; ".join(f"{server.name}: {server.down}" for server in lost))
            waited = True
            time.sleep(0.1)
        return waited

    def _lengths(self, name: str, ids: np.ndarray, tell=lambda count: None) -> np.ndarray:
        """Bytes of the values, int64 [n]; 0: there is none; -1: another kind of value."""
        found = np.zeros(len(ids), np.int64)
        for group in range(GROUPS):
            places = np.flatnonzero(ids % GROUPS == group)
            for first in range(0, len(places), _ASKED):
                part = places[first : first + _ASKED]
                keys = (leases.sample_key(self.servers, name, id) for id in ids[part].tolist())
                answers = self.servers.at(TAGS[group]).execute(*(("STRLEN", key) for key in keys))
                for answer in answers:
                    if isinstance(answer, wire.Refused) and answer.code != "WRONGTYPE":
                        raise Unavailable(str(answer))
                found[part] = [answer if isinstance(answer, int) else -1 for answer in answers]
                tell(len(part))
        return found


def _checked(short_side: int) -> None:
    if short_side != forms.SHORT_SIDE:
        raise BadInput(
            f"--short_side {short_side}: a shared cache has {forms.SHORT_SIDE}, packs may have others"
        )
