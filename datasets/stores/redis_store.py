"""A store in Redis or Valkey that all nodes share: a server, a Cluster, or a cloud's managed service.

A sample is a string. Its key has the data set's fingerprint, the form and the id, so changed data never get
old samples. The value begins with its size and a CRC-32 of key, size and content. A value that does not match
is a miss.
"""

import collections
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import ArrayLike

from bootfile.ground.errors import printable
from datasets.folders.image_index import ImageFolderIndex
from datasets.stores import forms, references
from datasets.stores.connection import Server, Unavailable
from datasets.stores.forms import Sample

_HEADER = struct.Struct("<4sIIQI")  # magic, height, width, bytes, crc32
_MAGIC = b"BFS\1"
_PUT = 16  # samples that are sent before their answers are read
_WAITING = 256  # samples that wait to be put; further samples are put in the next epoch
_BEAT = 5.0  # seconds between two heartbeats


class RedisStore:
    """The samples of a data set on the server. Threads may share it; it can be pickled and survives a fork.

    index: an image_index.ImageFolderIndex.
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
        self.reference = references.Reference(server, self.name, len(index), mode, title)
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
            refused = [answer for answer in answers if isinstance(answer, Exception)]
            if refused:
                self.server.pause_puts(refused[0])
                break
        return taken

    def _set_command(self, id: int, sample: Sample) -> tuple:
        """Return the command of Redis that puts a sample."""
        key = self._key(id)
        content = np.frombuffer(sample.content, np.uint8).data
        value = _header(key, sample.height, sample.width, content) + content
        # at different times, even if no job is left that deletes the data set
        seconds = references.SAMPLE_LIFETIME - id * 7919 % (references.SAMPLE_LIFETIME // 4)
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
        return references.send_redis_command(self.server, self.name, "STRLEN", ids, log)

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
        return references.sample_key(self.server, self.name, int(id))

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
                    references.sweep(self.server)
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
