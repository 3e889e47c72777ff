"""A data set in Redis or Valkey, which all nodes share: one server, a Cluster, or a cloud's managed service.

A sample is a string under a key of its data set's fingerprint, form and id, so changed data are never served
from what was kept before. It begins with its size and a CRC-32 of key, size and content; what does not fit is
a miss, and counted. Keys end in ":<id>" after a hash tag: one of 128 groups, evenly over a Cluster's slots,
so that what lies on one node is asked for together.
"""

import contextlib
import os
import struct
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from datasets.stores import forms
from datasets.stores.forms import Sample
from datasets.stores.shared import leases, wire
from datasets.stores.shared.servers import GROUPS, TAGS, Servers, Unavailable

_HEADER = struct.Struct("<4sIIQI")  # magic, height, width, bytes, crc32
_MAGIC = b"BFS\1"
_PUT = 16  # samples that are sent before their answers are read
_WAITING = 64 << 20  # bytes of samples that wait to be put; more are left out, and put in the next epoch
_BEAT = 5.0  # seconds between the figures and signs of life that are sent
_FULL, _LONGEST_FULL = 15.0, 240.0  # seconds before the next try to put into a full server
_USED = 0.9  # share of the memory that is filled where the server would evict
_LOOK = 64 << 20  # bytes put between looks at that
_NODES = 8  # asked at a time
_BUFFERS = 8  # kept for each server, to be read into again
COUNTED = ("hits", "misses", "bad", "errors", "put")


class RedisStore:
    """The samples of a data set on the servers. index: an image_folder.Index.

    mode: "active" takes its part in putting what was missed, and the last job that lets go takes all away;
    "offline" reads what was put by a preload, which stays; "" neither puts nor holds a lease (to preload and
    look after it). `counts`: hits, misses, bad, errors and put of this process so far. reads: SharedCounts
    that the first four of what is read are added to, too.
    """

    def __init__(self, servers: Servers, index, mode: str = "", form: str | None = None, reads=None):
        self.servers, self.index, self.mode, self.reads = servers, index, mode, reads
        self._owner = os.getpid()
        self.form = form or servers.address.form
        label = self.form if self.form == "encoded" else f"{self.form}{forms.SHORT_SIDE}"
        self.name = f"{index.fingerprint}:{label}"
        title = f"{os.path.basename(index.root)}/{index.split}"
        self.lease = leases.Lease(servers, self.name, len(index), mode, title)
        self._renew()
        if mode:
            self._at_work()

    def read(self, ids) -> list[bytes | np.ndarray | None]:
        """Return the samples: the files' bytes, or uint8 [height, width, 3]; None for each miss.

        ids: int64 [n]. Never raises for a fault of a server.
        """
        return [sample and self._of_form(sample) for sample in self.get(ids)]

    def _of_form(self, sample: Sample) -> bytes | np.ndarray:
        if self.form == "encoded":
            return bytes(sample.content)
        return np.frombuffer(sample.content, np.uint8).reshape(sample.height, sample.width, 3)

    def get(self, ids) -> list[Sample | None]:
        """The samples, None for those that are not there. ids: int64 [n]. Never raises for a server's
        faults."""
        return [self.checked(id, raw) for id, raw in zip(ids, self.fetch(ids), strict=True)]

    def fetch(self, ids) -> list[np.ndarray | None]:
        """The values as they came, uint8 [n] each, for checked(): the checksum is left to whoever decodes."""
        ids = np.asarray(ids, dtype=np.int64)
        self._at_work()
        found: list[np.ndarray | None] = [None] * len(ids)
        lengths = (forms.sizes(self.index, ids, self.form)[2] + _HEADER.size).tolist()
        parts, lost = self._parts(ids)

        def read(part) -> tuple[int, int]:
            return self._read(*part, ids, lengths, found)

        outcomes = list((self._pool().map if len(parts) > 1 else map)(read, parts.items()))
        bad, errors = (sum(column) for column in zip((0, lost), *outcomes, strict=True))
        missing = sum(value is None for value in found)
        self._count_reads(hits=len(ids) - missing, misses=missing - bad - errors, bad=bad, errors=errors)
        return found

    def checked(self, id: int, raw: np.ndarray | None) -> Sample | None:
        """The sample in a value; None, and counted, where it is not what was put."""
        if raw is None:
            return None
        magic, height, width, size, checksum = _HEADER.unpack_from(raw)
        content = raw[_HEADER.size :]
        expected = forms.size(self.index, id, self.form)
        right = (magic, len(content)) == (_MAGIC, size) and (height, width, size) == expected
        if right and zlib.crc32(content, self._seed(id, height, width, size)) == checksum:
            return Sample(height, width, content)
        self._count_reads(hits=-1, bad=1)
        return None

    def put(self, ids, samples: list[Sample]) -> int:
        """Keep the samples. Returns how many of them were taken: none where a server is full or away."""
        self._at_work()
        parts: dict = {}
        for id, sample in zip(ids, samples, strict=True):
            if server := self.servers.up(id % GROUPS):
                parts.setdefault(server, []).append((int(id), sample))
        taken = 0
        for server, entries in parts.items():
            for first in range(0, len(entries), _PUT):
                part = entries[first : first + _PUT]
                commands = [
                    ("SET", self._key(id), self._value(id, sample), *self._ending(id)) for id, sample in part
                ]
                size = sum(len(command[2]) for command in commands)
                if time.monotonic() < server.full_until or not self._has_room(server, size):
                    break
                try:
                    answers = server.execute(*commands)
                except Unavailable:
                    self.servers.begin()
                    self._count(errors=len(part))
                    break
                taken += answers.count(b"OK")
                refused = [answer for answer in answers if isinstance(answer, wire.Refused)]
                if refused:
                    self._not_taken(server, refused[0])
                    break
        self._count(put=taken)
        return taken

    def wants(self, id: int) -> bool:
        """Whether put_later() makes sense now: not offline, and not where a server is full or away."""
        if self.mode != "active" or self._waiting_bytes > _WAITING:
            return False
        server = self.servers.up(id % GROUPS)
        return server is not None and time.monotonic() >= server.full_until

    def put_later(self, id: int, sample: Sample) -> None:
        """put() in the background."""
        with self._lock:
            self._waiting.append((id, sample))
            self._waiting_bytes += len(sample.content)
            several = len(self._waiting) >= _PUT
        if several:
            self.servers.wake()

    def lengths(self, ids) -> np.ndarray:
        """Bytes of the values that are there, int64 [n]; 0: there is none; -1: it cannot be known now."""
        return self._asked("STRLEN", ids)

    def whole(self, ids) -> np.ndarray:
        """What lengths() says of values that are as they were put, int64 [n]."""
        return forms.sizes(self.index, np.asarray(ids, dtype=np.int64), self.form)[2] + _HEADER.size

    def keep(self, ids) -> None:
        """Make samples that an active job has put stay."""
        self._asked("PERSIST", ids)

    def close(self) -> None:
        """Let go; the last one of an active data set takes it away."""
        self._tick(last=True)
        self.lease.release()
        if self._threads:
            self._threads.shutdown()
            self._threads = None

    def __getstate__(self) -> dict:
        kept = ("servers", "index", "mode", "reads", "form", "name", "lease")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._owner = None
        self._renew()

    def _renew(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self.counts, self._sent = dict.fromkeys(COUNTED, 0), dict.fromkeys(COUNTED, 0)
        self._waiting, self._waiting_bytes, self._beat_at = [], 0, 0.0
        self._threads, self._buffers, self._ticking = None, [], False
        self._looked: dict = {}
        self._swept = os.getpid() != self._owner

    def _at_work(self) -> None:
        """In a process that has only just begun, or that was forked: the background thread knows of this."""
        if os.getpid() != self._pid:
            self._renew()
        if not self._ticking:
            self._ticking = True
            self.servers.each_tick(self._tick)

    def _parts(self, ids: np.ndarray) -> tuple[dict, int]:
        """{server: lists of places in ids, whose keys may be asked for together}, and how many have none."""
        parts, lost = {}, 0
        groups = ids % GROUPS
        for group, places in _places(groups) if self.servers.cluster else [(0, list(range(len(ids))))]:
            if server := self.servers.up(group):
                parts.setdefault(server, []).append(places)
            else:
                lost += len(places)
        return parts, lost

    def _read(self, server, groups: list[list[int]], ids, lengths, found) -> tuple[int, int]:
        """Fill in what the server has. (bad values, values that could not be asked for)."""
        places = [place for group in groups for place in group]
        keys = [[self._key(ids[place]) for place in group] for group in groups]
        wanted = [lengths[place] for place in places]
        memory, array = self._buffer(wire.room(wanted))
        try:
            values = server.values(keys, wanted, memory)
        except Unavailable:
            self.servers.begin()
            return 0, len(places)
        for place, value in zip(places, values, strict=True):
            if isinstance(value, tuple):
                found[place] = array[value[0] : value[1]]
        bad, errors = values.count(wire.BAD), values.count(wire.REFUSED)
        if errors:
            self.servers.moved()
        return bad, errors

    def _buffer(self, size: int) -> tuple[bytearray, np.ndarray]:
        """Memory that nobody reads any more: fresh memory would cost a third of what it takes to fill it."""
        with self._lock:
            for memory, array, count in _references(self._buffers):
                if count == _OURS and len(memory) >= size:
                    return memory, array[:]
            memory = bytearray(size + size // 8)  # the next batch may be larger
            kept = self._buffers[-_BUFFERS * len(self.servers) + 1 :]
            self._buffers = [*kept, (memory, np.frombuffer(memory, np.uint8))]
            return memory, self._buffers[-1][1][:]

    def _pool(self) -> ThreadPoolExecutor:
        """To ask several nodes at a time."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(min(_NODES, len(self.servers)), "cache-node")
            return self._threads

    def _key(self, id: int) -> bytes:
        return leases.sample_key(self.servers, self.name, int(id))

    def _value(self, id: int, sample: Sample) -> bytes:
        size = len(sample.content)
        checksum = zlib.crc32(sample.content, self._seed(id, sample.height, sample.width, size))
        return b"".join((_HEADER.pack(_MAGIC, sample.height, sample.width, size, checksum), sample.content))

    def _seed(self, id: int, height: int, width: int, size: int) -> int:
        return zlib.crc32(self._key(id) + struct.pack("<IIQ", height, width, size))

    def _ending(self, id: int) -> tuple:
        """An active set does not stay, even where nobody is left to take it away."""
        seconds = leases.LEFT - id * 7919 % (leases.LEFT // 4)  # not all at one time
        return () if self.lease.stays else ("EX", seconds)

    def _has_room(self, server, size: int) -> bool:
        """Whether to put so much: not what would push out something else."""
        looked = self._looked.setdefault(server, {"left": 0, "room": True})
        looked["left"] -= size
        if looked["left"] < 0:
            try:
                answer = server.execute(("INFO", "memory"))[0]
            except Unavailable:
                return False
            if not isinstance(answer, bytes):
                answer = b""
            known = dict(line.split(":", 1) for line in answer.decode().splitlines() if ":" in line)
            evicts = known.get("maxmemory_policy", "noeviction") != "noeviction"
            limit, used = int(known.get("maxmemory", 0)), int(known.get("used_memory", 0))
            looked |= {"left": _LOOK, "room": not (evicts and limit and used > _USED * limit)}
            if not looked["room"]:
                self._not_taken(server, "it is nearly full, and would evict what it has")
        return looked["room"]

    def _not_taken(self, server, reason) -> None:
        """Nothing more is put there for a while; what it has is still read."""
        if not server.full_pause:
            self.servers.say(
                f"cache {server.name} takes no more samples: {reason}; the rest comes from the next tier"
            )
        server.full_pause = min(max(_FULL, 2 * server.full_pause), _LONGEST_FULL)
        server.full_until = time.monotonic() + server.full_pause
        self._looked.pop(server, None)

    def _asked(self, command: str, ids) -> np.ndarray:
        """The command's answer for each sample, int64 [n]; -1 where there is none."""
        ids, found = np.asarray(ids, dtype=np.int64), np.full(len(ids), -1, np.int64)
        for group, places in _places(ids % GROUPS):
            try:
                answers = self.servers.at(TAGS[group]).execute(
                    *((command, self._key(id)) for id in ids[places].tolist())
                )
            except Unavailable:
                self.servers.wake()
                continue
            found[places] = [answer if isinstance(answer, int) else -1 for answer in answers]
        return found

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, number in counts.items():
                self.counts[name] += number

    def _count_reads(self, **counts: int) -> None:
        self._count(**counts)
        if self.reads:
            self.reads.add(**counts)

    def _tick(self, last: bool = False) -> None:
        """In the background: put what waits; now and then send figures and a sign of life."""
        while self._waiting:
            with self._lock:
                part, self._waiting = self._waiting[: 4 * _PUT], self._waiting[4 * _PUT :]
                self._waiting_bytes -= sum(len(sample.content) for _, sample in part)
            self.put(*zip(*part, strict=True))
        if not last and time.monotonic() < self._beat_at:
            return
        self._beat_at = time.monotonic() + _BEAT
        for server in self.servers if os.getpid() == self._owner else ():
            with contextlib.suppress(Unavailable):  # to notice, and say, that it is away
                server.execute(("PING",))
        with self._lock:
            counts = dict(self.counts)
        changed = {name: number - self._sent[name] for name, number in counts.items()}
        if self.lease.beat({name: number for name, number in changed.items() if number}):
            self._sent = counts
            if not self._swept and self.mode:
                leases.sweep(self.servers)
                self._swept = True


def _places(groups: np.ndarray):
    """(group, the places where it stands) for every group."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1)).tolist()
    for first, last in zip(starts, [*starts[1:], len(order)], strict=True):
        yield int(groups[order[first]]), order[first:last].tolist()


def _references(buffers: list) -> list:
    return [(memory, array, sys.getrefcount(array)) for memory, array in buffers]


_OURS = _references([(bytearray(1), np.empty(1))])[0][2]
