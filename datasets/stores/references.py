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

from datasets.stores.connection import Server, Unavailable

LIFETIME = 60  # seconds after the last heartbeat until a reference expires
SAMPLE_LIFETIME = 12 * 3600  # seconds
_KEYS = 500  # requested at a time
_OFFLINE = b"offline"  # the member of the sorted set that does not expire
# The keys of a data set in addition to its samples. Other versions of Bootfile share them: the names stay.
_ABOUT = "about"
_REFERENCES = "leases"


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
    refused = [answer for answer in answers if not isinstance(answer, int)]
    if refused:
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
