"""A store in Redis or Valkey that all nodes share: a server, a Cluster, or a cloud's managed service.

A sample is a string. Its key has the data set's fingerprint, the form and the id, so changed data never get
old samples. The value begins with its size and a CRC-32 of key, size and content. A value that does not match
is a miss.

A user is a process of a job that reads the data set. Its reference is a member of a sorted set with the score
"server time + LIFETIME", and a heartbeat renews it every few seconds. The process that releases the last
reference deletes an active data set; the keys follow from the number of samples, without a search. The
reference of a killed job expires, and the next job that uses the server deletes the data. Samples of an
active data set also expire after SAMPLE_LIFETIME at the latest (a longer job puts them again). An offline
data set has a reference that does not expire.
"""

import collections
import contextlib
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bootfile.ground.errors import printable
from datasets.folders.image_folder import ImageFolderIndex
from datasets.stores import forms
from datasets.stores.connection import Server, Unavailable
from datasets.stores.forms import Sample

_HEADER = struct.Struct("<4sIIQI")  # magic, height, width, bytes, crc32
_MAGIC = b"BFS\1"
_PUT = 16  # samples that are sent before their answers are read
_WAITING = 256  # samples that wait to be put; further samples are put in the next epoch
LIFETIME = 60  # seconds after the last heartbeat until a reference expires
SAMPLE_LIFETIME = 12 * 3600  # seconds
_KEYS = 500  # requested at a time
_OFFLINE = b"offline"  # the member of the sorted set that does not expire
# The keys of a data set in addition to its samples. Other versions of Bootfile share them: the names stay.
_ABOUT = "about"
_REFERENCES = "leases"
_BEAT = 5.0  # seconds between two heartbeats


class RedisStore:
    """The samples of a data set on the server. Threads may share it; it can be pickled and survives a fork.

    index: an image_folder.ImageFolderIndex.
    mode: "active" puts missing samples, and the last job that closes deletes the data set; "offline" reads a
        preloaded data set, which stays; "" neither puts nor counts as a user (for tools).
    form: of the samples, one of forms.SIZED (None: the form of the address).
    """

    def __init__(self, server: Server, index: ImageFolderIndex, mode: str = "", form: str | None = None):
        self.server = server
        self.index = index
        self.mode = mode
        self.form = form or server.address.form
        self.name = f"{index.fingerprint}:{forms.label(self.form)}"
        title = printable(f"{os.path.basename(index.root)}/{index.split}")  # a name may have any bytes
        self.reference = Reference(server, self.name, len(index), mode, title)
        self._pid: int | None = None  # the process in which _start() ran
        self._start()

    def read(self, ids: ArrayLike) -> list[bytes | np.ndarray | None]:
        """Return the samples: the files' bytes, or uint8 [height, width, 3]; None for each miss, as of one
        that is damaged, or that the server fails to send. ids: int64 [n]."""
        self._start()
        ids = np.asarray(ids, dtype=np.int64)
        heights, widths, sizes = forms.sizes(self.index, ids, self.form)
        keys = [self._key(id) for id in ids.tolist()]
        try:
            values = self.server.mget(keys, sizes)
        except Unavailable:
            return [None] * len(ids)
        samples: list[bytes | np.ndarray | None] = []
        rows = zip(keys, values, heights.tolist(), widths.tolist(), sizes.tolist(), strict=True)
        for key, value, height, width, size in rows:
            stored = value or b""
            content = memoryview(stored)[_HEADER.size :]
            is_whole = len(content) == size and stored[: _HEADER.size] == _header(key, height, width, content)
            samples.append(Sample(height, width, content).value(self.form) if is_whole else None)
        return samples

    def is_empty(self) -> bool:
        """Return whether none of up to 100 samples is stored. False if the server cannot be asked now."""
        step = -(-len(self.index) // 100)
        try:
            return not self.lengths(range(0, len(self.index), step)).any()
        except Unavailable:
            return False

    def put(self, ids: Iterable[int], samples: list[Sample]) -> int:
        """Put the samples. Return how many were stored. A server that is full or down stores no more."""
        self._start()
        entries = [(int(id), sample) for id, sample in zip(ids, samples, strict=True)]
        taken = 0
        for first in range(0, len(entries), _PUT):
            commands = [self._set_command(*entry) for entry in entries[first : first + _PUT]]
            try:
                # in turns: a server that becomes full gets no further ones
                if self.server.is_full():
                    break
                answers = self.server.execute(*commands, errors=True)
            except Unavailable:
                break
            # a server that is full answers each SET with an error
            taken += answers.count(True)
            if refused := [answer for answer in answers if isinstance(answer, Exception)]:
                self.server.pause_puts(refused[0])
                break
        return taken

    def _set_command(self, id: int, sample: Sample) -> tuple:
        """Return the command of Redis that puts a sample."""
        key = self._key(id)
        content = np.frombuffer(sample.content, np.uint8).data
        value = _header(key, sample.height, sample.width, content) + content
        # at different times, even if no job is left that deletes the data set
        seconds = SAMPLE_LIFETIME - id * 7919 % (SAMPLE_LIFETIME // 4)
        return ("SET", key, value) if self.reference.is_offline else ("SET", key, value, "EX", seconds)

    def wants_samples(self) -> bool:
        """Return whether to call put_later(): in active mode, if the queue and the server have room."""
        has_room = len(self._waiting) < _WAITING and not self.server.is_full()
        return self.mode == "active" and has_room and self.server.down is None

    def put_later(self, id: int, sample: Sample) -> None:
        """Put one sample in the background: the thread that reads a batch does not wait for the server."""
        self._waiting.append((id, sample))
        if len(self._waiting) >= _PUT:
            self.server.wake()

    def lengths(self, ids: ArrayLike, log: Callable[[int], object] | None = None) -> np.ndarray:
        """Return how many bytes Redis has stored for each sample (header and content), int64 [n], without
        sending them. 0: the sample is not stored; -1: there is a value of another type. Tools find incomplete
        samples by comparing with whole_lengths().

        log: called with the number of samples requested since its last call. Raises Unavailable.
        """
        ids = np.asarray(ids, dtype=np.int64)
        return send_redis_command(self.server, self.name, "STRLEN", ids, log)

    def whole_lengths(self, ids: ArrayLike) -> np.ndarray:
        """Return the lengths() that complete values have, int64 [n]. They follow from the index."""
        return forms.sizes(self.index, np.asarray(ids, dtype=np.int64), self.form)[2] + _HEADER.size

    def close(self) -> None:
        """Release the reference. The last user of an active data set deletes the data set. It waits for a
        round of the background thread."""
        if os.getpid() != self._pid:  # the lock may have been held at the fork
            self._renew()
        # not during a round of the background thread: it would write to a data set that is deleted here
        with self._ticks:
            self._put_waiting()
            self.reference.beat()
            self._closed = True
            self.reference.release()

    def __getstate__(self) -> dict:
        kept = ("server", "index", "mode", "form", "name", "reference")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state, _pid=None)
        self._renew()

    def _renew(self) -> None:
        """Begin without a queue and a held lock. It is called first in each process: a forked one must not
        put the samples of its parent again, nor wait for its parent's threads."""
        # held during _tick(); a thread that holds it may collect garbage, and so close this store
        self._ticks = threading.RLock()
        self._waiting: collections.deque[tuple[int, Sample]] = collections.deque()  # of put_later()
        self._beat_at = 0.0  # time.monotonic() of the next heartbeat
        self._swept = False  # whether this process has deleted what killed jobs left
        self._closed = False

    def _start(self) -> None:
        """Register _tick() with the background thread, at the first use in each process: threads do not
        survive a fork."""
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._renew()
            self.server.each_tick(self._tick)

    def _key(self, id: int) -> bytes:
        return sample_key(self.server, self.name, int(id))

    def _tick(self) -> None:
        """Put the samples that wait, and send a heartbeat every _BEAT seconds. A later heartbeat would write
        to a deleted data set."""
        with self._ticks:
            if self._closed:
                return
            self._put_waiting()
            if time.monotonic() >= self._beat_at:
                self._beat_at = time.monotonic() + _BEAT
                if self.reference.beat() and not self._swept:
                    sweep(self.server)
                    self._swept = True

    def _put_waiting(self) -> None:
        """Put the samples that put_later() has queued."""
        while self._waiting:
            entries = [self._waiting.popleft() for _ in range(min(_PUT, len(self._waiting)))]
            self.put([id for id, _ in entries], [sample for _, sample in entries])


def _header(key: bytes, height: int, width: int, content: memoryview) -> bytes:
    """Return what stands before the content in a value. Reads compare it, puts write it."""
    # with the key: the value of another sample does not match
    seed = zlib.crc32(key + struct.pack("<IIQ", height, width, len(content)))
    return _HEADER.pack(_MAGIC, height, width, len(content), zlib.crc32(content, seed))


class StoredSet(NamedTuple):
    """A data set on the server. name: "<fingerprint>:<form>". title: the name for users. samples: of the data
    set, stored or not. mode: "active" or "offline". references: (host:process:token, seconds until it
    expires) of each process that uses it."""

    name: str
    title: str
    samples: int
    mode: str
    references: list[tuple[str, float]]

    @property
    def users(self) -> list[str]:
        """Return the processes that use it in words."""
        return [f"{process} (its reference expires in {left:.0f} s)" for process, left in self.references]


class Reference:
    """The reference of this process to a data set on the server. title: the data set's name for users. mode:
    "active", "offline", or "" for a tool, which is not counted."""

    def __init__(self, server: Server, name: str, samples: int, mode: str, title: str):
        self.server = server
        self.name = name
        self.samples = samples
        self.mode = mode
        self.title = title
        self._about = _key(server, name, _ABOUT)
        self._members = _key(server, name, _REFERENCES)
        self._process = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"  # the member
        self._pid: int | None = os.getpid()  # the process that is counted; None: a pickled copy
        self.is_offline = False  # whether the data set stays on the server
        self.is_counted = False  # whether the server counts this process

    def beat(self) -> bool:
        """Send a heartbeat. Return False if the server cannot be asked now, or for a tool, which has no mode.

        Only the process that created this object is counted; its DataLoader's workers only ask whether the
        data set is an offline one. A user without heartbeats is taken for killed, and its data set may be
        deleted."""
        if not self.mode:
            return False
        is_user = os.getpid() == self._pid
        commands = list[tuple]()
        try:
            if is_user and self.mode == "active":
                self.register()
            if is_user:
                commands.append(("ZADD", self._members, self.server.time() + LIFETIME, self._process))
            # the member with the highest score: that of an offline data set is infinite
            last = self.server.execute(*commands, ("ZRANGE", self._members, -1, -1))[-1]
            self.is_offline = last == [_OFFLINE]  # before any key gets an expiry time
            # longer than the samples: remove() finds their keys by these
            command = ("PERSIST",) if self.is_offline else ("EXPIRE",)
            lifetime = () if self.is_offline else (2 * SAMPLE_LIFETIME,)
            self.server.execute((*command, self._about, *lifetime), (*command, self._members, *lifetime))
        except Unavailable:
            return False
        self.is_counted = is_user
        return True

    def register(self, offline: bool = False) -> None:
        """Register the data set on the server. offline: it stays there. Raises Unavailable. Without it
        list_sets() would not see the samples, and no process would delete them."""
        self.server.execute(
            ("HSET", self._about, "samples", self.samples, "title", self.title),
            ("SADD", _names(self.server), self.name),
        )
        if offline:
            self.is_offline = True
            add = ("ZADD", self._members, "+inf", _OFFLINE)
            self.server.execute(add, ("PERSIST", self._about), ("PERSIST", self._members))

    def release(self) -> None:
        """Release the reference. The last user of an active data set deletes the data set."""
        if not self.is_counted or os.getpid() != self._pid:
            return
        self.is_counted = False
        with contextlib.suppress(Unavailable):
            self.server.execute(("ZREM", self._members, self._process))
            _remove_unused(self.server, self.name)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_pid": None}


def sample_key(server: Server, name: str, id: int) -> bytes:
    """Return the key of a sample on the server."""
    return _key(server, name, id).encode()


def list_sets(server: Server) -> list[StoredSet]:
    """Return the data sets on the server, for sweep() and for tools. Raises Unavailable."""
    names = server.execute(("SMEMBERS", _names(server)))[0]
    return [_read_set(server, name.decode()) for name in sorted(names)]


def remove(server: Server, name: str, log: Callable[[int], object] | None = None) -> None:
    """Delete a data set: its samples, the words about it and its references. The samples go first: if it is
    interrupted, the data set is still listed, and the next sweep() deletes the rest. log: called with the
    number of samples deleted since its last call. Raises Unavailable."""
    send_redis_command(server, name, "UNLINK", np.arange(_read_set(server, name).samples), log)
    server.execute(("UNLINK", _key(server, name, _ABOUT)), ("UNLINK", _key(server, name, _REFERENCES)))
    server.execute(("SREM", _names(server), name))


def send_redis_command(
    server: Server, name: str, command: str, ids: np.ndarray, log: Callable[[int], object] | None = None
) -> np.ndarray:
    """Send Redis a command for the key of each of some samples. Return its integer answers, int64 [n].

    command: "STRLEN" (bytes of the value, 0: not stored), "UNLINK" (1: deleted) or "PERSIST" (1: it no longer
        expires). The answer is -1 if Redis has a value of another type under the key.
    name: of a StoredSet. log: called with the number of samples requested since its last call.
    Raises Unavailable.
    """
    answers: list[Any] = []
    for first in range(0, len(ids), _KEYS):
        part = ids[first : first + _KEYS].tolist()
        answers += server.execute(*[(command, sample_key(server, name, id)) for id in part], errors=True)
        if log:
            log(len(part))
    # an error of Redis about this key only
    answers = [-1 if str(answer).startswith("WRONGTYPE") else answer for answer in answers]
    if refused := [answer for answer in answers if not isinstance(answer, int)]:
        raise Unavailable(str(refused[0]))
    return np.array(answers, np.int64)


def sweep(server: Server) -> None:
    """Delete the data sets that killed jobs have left. The background thread of each store calls it once,
    after its first heartbeat: a killed job cannot delete its own."""
    with contextlib.suppress(Unavailable):
        for stored in list_sets(server):
            if stored.mode == "active" and not stored.references:
                _remove_unused(server, stored.name)


def _remove_unused(server: Server, name: str) -> None:
    """Delete a data set unless a process uses it. The server first forgets the references that expired."""
    members = _key(server, name, _REFERENCES)
    # by the server's clock, by which the references were written
    _, number = server.execute(("ZREMRANGEBYSCORE", members, "-inf", server.time()), ("ZCARD", members))
    if number == 0:
        remove(server, name)


def _read_set(server: Server, name: str) -> StoredSet:
    """Return what the server knows about a data set. Raises Unavailable."""
    now = server.time()
    about, scores = server.execute(
        ("HGETALL", _key(server, name, _ABOUT)),
        ("ZRANGE", _key(server, name, _REFERENCES), 0, -1, "WITHSCORES"),
    )
    # the answer is one list: member, score, member, score, ...
    ends = dict(zip(scores[::2], map(float, scores[1::2]), strict=True))
    mode = "offline" if ends.pop(_OFFLINE, None) else "active"
    references = [(process.decode(), end - now) for process, end in ends.items() if end > now]
    title = about.get(b"title", b"").decode()
    return StoredSet(name, title, int(about.get(b"samples", 0)), mode, references)


def _key(server: Server, name: str, of: str | int) -> str:
    """Return the key of a part of a data set. of: the id of a sample, or _ABOUT or _REFERENCES."""
    return f"{server.address.prefix}:{name}:{of}"


def _names(server: Server) -> str:
    """Return the key of the set with the names of all data sets."""
    return f"{server.address.prefix}:names"
