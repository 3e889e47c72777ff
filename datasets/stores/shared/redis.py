"""A store in Redis or Valkey that all nodes share: one server, a Cluster, or a cloud's managed service.

A sample is a string. Its key has the data set's fingerprint, the form and the id, so changed data never get
old samples. The value begins with its size and a CRC-32 of key, size and content. A value that does not match
is a miss and is counted as bad. Keys end in a hash tag and ":<id>". The 128 hash tags (groups) are evenly
spread over a Cluster's slots; samples of one group are requested together.
"""

import contextlib
import itertools
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from datasets.folders.image_folder import ImageFolderIndex
from datasets.stores import forms
from datasets.stores.forms import Sample
from datasets.stores.shared import leases
from datasets.stores.shared.servers import GROUPS, Server, Servers, Unavailable, load_redis

_HEADER = struct.Struct("<4sIIQI")  # magic, height, width, bytes, crc32
_MAGIC = b"BFS\1"
_REQUEST = 800_000  # bytes requested at a time: larger answers are slower
_PUT = 16  # samples that are sent before their answers are read
_WAITING = 64 << 20  # bytes of samples that wait to be put; further samples are put in the next epoch
_BEAT = 5.0  # seconds between two heartbeats, which also send the counts
_FULL, _LONGEST_FULL = 15.0, 240.0  # seconds before the next try to put into a full server
_USED = 0.9  # share of the memory that is filled if the server would evict
_LOOK = 64 << 20  # bytes put between two checks of the memory
COUNTED = ("hits", "misses", "bad", "errors", "put")


class RedisStore:
    """The samples of a data set on the servers. Threads may share it; it can be pickled and survives a fork.

    index: an image_folder.ImageFolderIndex.
    mode: "active" puts missing samples, and the last job that closes deletes the data set; "offline" reads a
        preloaded data set, which stays; "" neither puts nor holds a lease (for tools).
    form: of the samples, one of forms.SIZED (None: the form of the address).
    reads: SharedCounts, to which hits, misses, bad and errors are also added.
    `counts`: hits, misses, bad, errors and put of this process so far.
    """

    def __init__(
        self,
        servers: Servers,
        index: ImageFolderIndex,
        mode: str = "",
        form: str | None = None,
        reads: Any = None,
    ):
        self.servers, self.index, self.mode, self.reads = servers, index, mode, reads
        self._owner: int | None = os.getpid()
        self.form = form or servers.address.form
        self.name = f"{index.fingerprint}:{forms.label(self.form)}"
        title = f"{os.path.basename(index.root)}/{index.split}"
        self.lease = leases.Lease(servers, self.name, len(index), mode, title)
        self._renew()
        if mode:
            self._start()

    def read(self, ids: ArrayLike) -> list[bytes | np.ndarray | None]:
        """Return the samples: the files' bytes, or uint8 [height, width, 3]; None for each miss.

        ids: int64 [n]. A sample that a server fails to send is a miss.
        """
        self._start()
        ids = np.asarray(ids, dtype=np.int64)
        groups = ids % GROUPS if self.servers.cluster else np.zeros_like(ids)
        found: list[bytes | np.ndarray | None] = [None] * len(ids)
        parts: dict[Server, list[int]] = {}
        for place in np.argsort(groups, kind="stable").tolist():
            if server := self.servers.up(int(groups[place])):
                parts.setdefault(server, []).append(place)
        lost = len(ids) - sum(map(len, parts.values()))

        def read_part(part: tuple[Server, list[int]]) -> tuple[int, int]:
            return self._read(*part, ids, groups, found)

        outcomes = (self.servers.threads.map if len(parts) > 1 else map)(read_part, parts.items())
        bad, failed = (sum(column) for column in zip((0, lost), *outcomes, strict=True))
        missing = sum(value is None for value in found)
        counts = {"hits": len(ids) - missing, "misses": missing - bad - failed, "bad": bad, "errors": failed}
        self._count(**counts)
        if self.reads:
            self.reads.add(**counts)
        return found

    def is_empty(self) -> bool:
        """Return whether none of up to 100 samples is stored. False if the servers cannot be asked now."""
        try:
            return not self.lengths(range(0, len(self.index), -(-len(self.index) // 100))).any()
        except Unavailable:
            return False

    def put(self, ids: Iterable[int], samples: list[Sample]) -> int:
        """Put the samples. Return how many were stored. A server that is full or down stores no more."""
        self._start()
        parts: dict[Server, list] = {}
        for id, sample in zip(ids, samples, strict=True):
            if server := self.servers.up(id % GROUPS):
                parts.setdefault(server, []).append((int(id), sample))
        taken = 0
        for server, entries in parts.items():
            for first in range(0, len(entries), _PUT):
                part = entries[first : first + _PUT]
                commands = [
                    ("SET", self._key(id), self._value(id, sample), *self._expiry(id)) for id, sample in part
                ]
                size = sum(len(command[2]) for command in commands)
                try:
                    if time.monotonic() < server.full_until or not self._has_room(server, size):
                        break
                    answers = server.execute(*commands, errors=True)
                except Unavailable:
                    self._count(errors=len(part))
                    break
                taken += answers.count(True)
                if refused := [answer for answer in answers if isinstance(answer, Exception)]:
                    self._pause_puts(server, refused[0])
                    break
        self._count(put=taken)
        return taken

    def wants(self, id: int) -> bool:
        """Return whether to call put_later(): in active mode, if the queue and a server have room."""
        if self.mode != "active" or self._waiting_bytes > _WAITING:
            return False
        server = self.servers.up(id % GROUPS)
        return server is not None and time.monotonic() >= server.full_until

    def put_later(self, id: int, sample: Sample) -> None:
        """Put one sample in the background."""
        with self._lock:
            self._waiting.append((id, sample))
            self._waiting_bytes += len(sample.content)
            several = len(self._waiting) >= _PUT
        if several:
            self.servers.wake()

    def lengths(self, ids: ArrayLike, log: Callable[[int], object] = lambda count: None) -> np.ndarray:
        """Return the sizes of the values in bytes, int64 [n]; 0: not stored; -1: a value of another type.

        log: called with the number of samples requested since its last call. Raises Unavailable.
        """
        return leases.ask(self.servers, self.name, "STRLEN", np.asarray(ids, dtype=np.int64), log)

    def whole_lengths(self, ids: ArrayLike) -> np.ndarray:
        """Return the lengths() of undamaged values, int64 [n]."""
        return forms.sizes(self.index, np.asarray(ids, dtype=np.int64), self.form)[2] + _HEADER.size

    def keep(self, ids: ArrayLike) -> None:
        """Remove the expiry time of samples that an active job has put. Raises Unavailable."""
        leases.ask(self.servers, self.name, "PERSIST", np.asarray(ids, dtype=np.int64))

    def close(self) -> None:
        """Release the lease. The last release of an active data set deletes the data set."""
        if os.getpid() != self._pid:  # the lock may have been held at the fork
            self._renew()
        with self._ticks:
            self._beat(last=True)
            self._closed = True
            self.lease.release()

    def __getstate__(self) -> dict:
        kept = ("servers", "index", "mode", "reads", "form", "name", "lease")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._owner = None
        self._renew()

    def _renew(self) -> None:
        self._pid, self._lock, self._ticks = os.getpid(), threading.Lock(), threading.Lock()
        self._closed = False
        self.counts, self._sent = dict.fromkeys(COUNTED, 0), dict.fromkeys(COUNTED, 0)
        self._waiting: list[tuple[int, Sample]] = []
        self._waiting_bytes, self._beat_at = 0, 0.0
        self._ticking, self._unlooked = False, dict[Server, int]()
        self._swept = os.getpid() != self._owner

    def _start(self) -> None:
        """Register _tick() with the background thread, also in a forked process."""
        if os.getpid() != self._pid:
            self._renew()
        if not self._ticking:
            self._ticking = True
            self.servers.each_tick(self._tick)

    def _read(
        self, server: Server, places: list[int], ids: np.ndarray, groups: np.ndarray, found: list
    ) -> tuple[int, int]:
        """Fill `found` with a server's samples. Return the numbers of (damaged values, failed requests)."""
        sizes = forms.sizes(self.index, ids[places], self.form)[2]
        requests = [  # a request is a list of MGETs; an MGET is a list of places in ids
            [list(keys) for _, keys in itertools.groupby(request, lambda place: groups[place])]
            for request in np.split(places, np.flatnonzero(np.diff(np.cumsum(sizes) // _REQUEST)) + 1)
        ]

        errors = load_redis().exceptions

        def ask(client: Any) -> list:
            answers = []
            for request in requests:
                pipeline = client.pipeline(transaction=False)
                for keys in request:
                    pipeline.mget([self._key(ids[place]) for place in keys])
                for keys, answer in zip(request, pipeline.execute(raise_on_error=False), strict=True):
                    moved = isinstance(answer, (errors.AskError, errors.TryAgainError))
                    answers += [answer] * len(keys) if moved else _checked(answer, len(keys))
            return answers

        try:
            values = server.call(ask, int(sizes.sum()), again=True)
        except Unavailable:
            return 0, len(places)
        bad = moved = 0
        for place, value in zip(places, values, strict=True):
            if isinstance(value, Exception):
                moved += 1
            elif value is not None:
                found[place] = self._content(int(ids[place]), value)
                bad += found[place] is None
        if moved:
            self.servers.find_slots()
        return bad, moved

    def _content(self, id: int, value: bytes) -> bytes | np.ndarray | None:
        """Return the sample in a value, None if the value is damaged."""
        height, width, size = forms.size(self.index, id, self.form)
        if len(value) != _HEADER.size + size:
            return None
        content = memoryview(value)[_HEADER.size :]
        checksum = zlib.crc32(content, self._seed(id, height, width, size))
        if value[: _HEADER.size] != _HEADER.pack(_MAGIC, height, width, size, checksum):
            return None
        return Sample(height, width, content).value(self.form)

    def _key(self, id: int) -> bytes:
        return leases.sample_key(self.servers, self.name, int(id))

    def _value(self, id: int, sample: Sample) -> bytes:
        height, width, content = sample.height, sample.width, np.frombuffer(sample.content, np.uint8).data
        checksum = zlib.crc32(content, self._seed(id, height, width, len(content)))
        return _HEADER.pack(_MAGIC, height, width, len(content), checksum) + content

    def _seed(self, id: int, height: int, width: int, size: int) -> int:
        return zlib.crc32(self._key(id) + struct.pack("<IIQ", height, width, size))

    def _expiry(self, id: int) -> tuple:
        """Return the expiry option of SET: an active data set expires even if no job is left to delete it."""
        seconds = leases.LEFT - id * 7919 % (leases.LEFT // 4)  # samples expire at different times
        return () if self.lease.stays else ("EX", seconds)

    def _has_room(self, server: Server, size: int) -> bool:
        """Return whether `size` bytes fit without evicting other keys. Raises Unavailable."""
        self._unlooked[server] = self._unlooked.get(server, 0) - size
        if self._unlooked[server] < 0:
            known = server.memory()
            evicts = known.get("maxmemory_policy", "noeviction") != "noeviction"
            if evicts and 0 < _USED * known.get("maxmemory", 0) < known.get("used_memory", 0):
                self._pause_puts(server, "it is nearly full, and would evict other keys")
                return False
            self._unlooked[server] = _LOOK
        return True

    def _pause_puts(self, server: Server, reason: object) -> None:
        """Stop putting into a server for a while. Its samples are still read."""
        if not server.full_pause:
            self.servers.log(
                f"cache {server.name} stores no more samples: {reason}; the others come from the next tier"
            )
        server.full_pause = min(max(_FULL, 2 * server.full_pause), _LONGEST_FULL)
        server.full_until = time.monotonic() + server.full_pause
        self._unlooked.pop(server, None)

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, number in counts.items():
                self.counts[name] += number

    def _tick(self) -> None:
        """Run in the background until close(). A later heartbeat would write to a deleted data set."""
        with self._ticks:
            if not self._closed:
                self._beat()

    def _beat(self, last: bool = False) -> None:
        """Put the waiting samples, and send counts and a heartbeat every _BEAT seconds."""
        while self._waiting:
            with self._lock:
                part, self._waiting = self._waiting[: 4 * _PUT], self._waiting[4 * _PUT :]
                self._waiting_bytes -= sum(len(sample.content) for _, sample in part)
            self.put(*zip(*part, strict=True))
        if not last and time.monotonic() < self._beat_at:
            return
        self._beat_at = time.monotonic() + _BEAT
        for server in self.servers if os.getpid() == self._owner else ():
            with contextlib.suppress(Unavailable):  # to notice and log that it is down
                server.execute(("PING",))
        with self._lock:
            counts = dict(self.counts)
        changed = {name: number - self._sent[name] for name, number in counts.items()}
        if self.lease.beat({name: number for name, number in changed.items() if number}):
            self._sent = counts
            if not self._swept and self.mode:
                leases.sweep(self.servers)
                self._swept = True


def _checked(answer: object, count: int) -> list:
    """Return the answer to MGET. Raises the server's error, or ConnectionError if it is not a list."""
    if isinstance(answer, Exception):
        raise answer
    if not isinstance(answer, list) or len(answer) != count:
        raise ConnectionError(f"{count} values were asked for, the answer is {answer!r:.20}")
    return answer
