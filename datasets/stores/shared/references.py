"""Count the users of a data set in a shared cache, and delete the data set after the last one.

A user is a process of a job that reads the data set. Its reference is a member of a sorted set in Redis, with
the score "server time + LIFETIME", and a heartbeat renews it every few seconds. The process that releases the
last reference deletes an active data set; the keys follow from the number of samples, without a search. The
reference of a killed job expires, and the next job that uses the server deletes the data. Samples of an
active data set also expire after SAMPLE_LIFETIME at the latest (a longer job puts them again). An offline
data set has a reference that does not expire.
"""

import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from datasets.stores.shared.connection import Server, Unavailable

LIFETIME = 60  # seconds after the last heartbeat until a reference expires
SAMPLE_LIFETIME = 12 * 3600  # seconds
_KEYS = 500  # requested at a time
_OFFLINE = b"offline"  # the member of the sorted set that does not expire
# The keys of a data set in addition to its samples. Other versions of Bootfile share them: the names stay.
_ABOUT = "about"
_REFERENCES = "leases"


class StoredSet(NamedTuple):
    """A data set on the server.

    name: "<fingerprint>:<form>".
    title: the name for users.
    samples: number of samples of the data set, stored or not.
    mode: "active" or "offline".
    references: (host:process:token, seconds until it expires) of each process that uses it.
    """

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
    """The reference of this process to a data set on the server.

    title: the data set's name for users. mode: "active", "offline", or "" for a tool, which is not counted.
    """

    def __init__(self, server: Server, name: str, samples: int, mode: str, title: str):
        self.server, self.name, self.samples, self.mode, self.title = server, name, samples, mode, title
        self._process = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._pid: int | None = os.getpid()
        self.is_offline = False  # whether the data set stays on the server
        self.is_counted = False  # whether the server counts this process

    def beat(self) -> bool:
        """Send a heartbeat. Return False if the server cannot be asked now, or for a tool, which has no mode.

        Only the process that created this object is counted; its DataLoader's workers only ask whether the
        data set is an offline one.
        """
        if not self.mode:
            return False
        about = _key(self.server, self.name, _ABOUT)
        members = _key(self.server, self.name, _REFERENCES)
        is_user = os.getpid() == self._pid
        commands = list[tuple]()
        try:
            if is_user:
                if self.mode == "active":
                    self.register()
                commands.append(("ZADD", members, self.server.time() + LIFETIME, self._process))
            last = self.server.execute(*commands, ("ZRANGE", members, -1, -1))[-1]
            self.is_offline = last == [_OFFLINE]  # before any key gets an expiry time
            if self.is_offline:
                self.server.execute(("PERSIST", about), ("PERSIST", members))
            else:
                seconds = 2 * SAMPLE_LIFETIME
                self.server.execute(("EXPIRE", about, seconds), ("EXPIRE", members, seconds))
        except Unavailable:
            return False
        self.is_counted = is_user
        return True

    def register(self, offline: bool = False) -> None:
        """Register the data set on the server. offline: it stays there. Raises Unavailable."""
        about = _key(self.server, self.name, _ABOUT)
        members = _key(self.server, self.name, _REFERENCES)
        commands: list[tuple] = [
            ("HSET", about, "samples", self.samples, "title", self.title),
            ("SADD", _names(self.server), self.name),
        ]
        if offline:
            self.is_offline = True
            commands.append(("ZADD", members, "+inf", _OFFLINE))
            commands += [("PERSIST", about), ("PERSIST", members)]
        self.server.execute(*commands)

    def release(self) -> None:
        """Release the reference. The last user of an active data set deletes the data set."""
        if not self.is_counted or os.getpid() != self._pid:
            return
        self.is_counted = False
        with contextlib.suppress(Unavailable):
            self.server.execute(("ZREM", _key(self.server, self.name, _REFERENCES), self._process))
            _remove_unused(self.server, self.name)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_pid": None}


def sample_key(server: Server, name: str, id: int) -> bytes:
    return _key(server, name, id).encode()


def list_sets(server: Server) -> list[StoredSet]:
    """Return the data sets on the server. Raises Unavailable."""
    names = server.execute(("SMEMBERS", _names(server)))[0]
    return [_read_set(server, name.decode()) for name in sorted(names)]


def remove(server: Server, name: str, log: Callable[[int], object] = lambda samples: None) -> None:
    """Delete a data set: its samples, the words about it and its references.

    log: called with the number of samples deleted since its last call. Raises Unavailable.
    """
    ask(server, name, "UNLINK", np.arange(_read_set(server, name).samples), log)
    server.execute(("UNLINK", _key(server, name, _ABOUT)), ("UNLINK", _key(server, name, _REFERENCES)))
    server.execute(("SREM", _names(server), name))


def ask(
    server: Server,
    name: str,
    command: str,
    ids: np.ndarray,
    log: Callable[[int], object] = lambda count: None,
) -> np.ndarray:
    """Return a command's answer for each sample of a data set, int64 [n]; -1: a value of another type.

    log: called with the number of samples requested since its last call. Raises Unavailable.
    """
    answers: list[Any] = []
    for first in range(0, len(ids), _KEYS):
        part = ids[first : first + _KEYS].tolist()
        answers += server.execute(*((command, sample_key(server, name, id)) for id in part), errors=True)
        log(len(part))
    for answer in answers:
        if not isinstance(answer, int) and not str(answer).startswith("WRONGTYPE"):
            raise Unavailable(str(answer))
    return np.array([answer if isinstance(answer, int) else -1 for answer in answers], np.int64)


def sweep(server: Server) -> None:
    """Delete the data sets that killed jobs have left."""
    with contextlib.suppress(Unavailable):
        for stored in list_sets(server):
            if stored.mode == "active" and not stored.references:
                _remove_unused(server, stored.name)


def _remove_unused(server: Server, name: str) -> None:
    """Delete a data set unless a process uses it. The server first forgets the references that expired."""
    members = _key(server, name, _REFERENCES)
    _, number = server.execute(
        ("ZREMRANGEBYSCORE", members, "-inf", server.time()),
        ("ZCARD", members),
    )
    if number == 0:
        remove(server, name)


def _read_set(server: Server, name: str) -> StoredSet:
    now = server.time()
    about, scores = server.execute(
        ("HGETALL", _key(server, name, _ABOUT)),
        ("ZRANGE", _key(server, name, _REFERENCES), 0, -1, "WITHSCORES"),
    )
    ends = dict(zip(scores[::2], map(float, scores[1::2]), strict=True))
    mode = "active"
    if _OFFLINE in ends:
        mode = "offline"
        del ends[_OFFLINE]
    references = [(process.decode(), end - now) for process, end in ends.items() if end > now]
    title = about.get(b"title", b"").decode()
    return StoredSet(name, title, int(about.get(b"samples", 0)), mode, references)


def _key(server: Server, name: str, of: str | int) -> str:
    return f"{server.address.prefix}:{name}:{of}"


def _names(server: Server) -> str:
    return f"{server.address.prefix}:names"
