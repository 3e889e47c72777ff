"""Leases: register the users of a data set in a shared cache, and delete the data set after the last one.

Every process of a job that reads a data set sends a heartbeat every few seconds. It is a member of a sorted
set with the score "server time + LEASE". The last process that releases its lease deletes an active data
set; the keys follow from the number of samples, without a search. The lease of a killed job expires, and the
next job that uses the server deletes the data. Samples of an active data set also expire after LEFT seconds
at the latest (a longer job puts them again). An offline data set has a lease that does not end.
"""

import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from datasets.stores.shared.connection import Server, Unavailable

LEASE = 60  # seconds
LEFT = 12 * 3600  # seconds
_KEYS = 500  # requested at a time
_OFFLINE = b"offline"  # the holder of the lease that does not end
_RECORDS = ("about", "leases")  # the keys of a data set in addition to its samples


class Held(NamedTuple):
    """A data set on the server.

    name: "<fingerprint>:<form>".
    title: the name for users.
    samples: number of samples of the data set, stored or not.
    mode: "active" or "offline".
    leases: (host:process:token, seconds left) of each process.
    """

    name: str
    title: str
    samples: int
    mode: str
    leases: list[tuple[str, float]]

    @property
    def users(self) -> list[str]:
        """Return the holders of the leases in words."""
        return [f"{holder} (lease ends in {left:.0f} s)" for holder, left in self.leases]


class Lease:
    """The lease of a process. title: the data set's name for users. mode: "active", "offline", "": none."""

    def __init__(self, server: Server, name: str, samples: int, mode: str, title: str):
        self.server, self.name, self.samples, self.mode, self.title = server, name, samples, mode, title
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._pid: int | None = os.getpid()
        self.stays, self._held = False, False

    def beat(self) -> bool:
        """Send a heartbeat. Return False if the server cannot be asked now, or for a tool, which has no mode.

        Only the process that created this object holds the lease; its DataLoader's workers only ask whether
        the data set stays.
        """
        if not self.mode:
            return False
        about, users = (_key(self.server, self.name, of) for of in _RECORDS)
        holds, commands = os.getpid() == self._pid, list[tuple]()
        try:
            if holds:
                if self.mode == "active":
                    self.register()
                commands.append(("ZADD", users, self.server.time() + LEASE, self._holder))
            last = self.server.execute(*commands, ("ZRANGE", users, -1, -1))[-1]
            self.stays = last == [_OFFLINE]  # before any key gets an expiry time
            end = ("PERSIST",) if self.stays else ("EXPIRE", 2 * LEFT)
            self.server.execute(*((end[0], key, *end[1:]) for key in (about, users)))
        except Unavailable:
            return False
        self._held = holds
        return True

    def register(self, offline: bool = False) -> None:
        """Register the data set on the server. offline: it stays there. Raises Unavailable."""
        about, users = (_key(self.server, self.name, of) for of in _RECORDS)
        commands: list[tuple] = [
            ("HSET", about, "samples", self.samples, "title", self.title),
            ("SADD", _names(self.server), self.name),
        ]
        if offline:
            self.stays = True
            commands += [("ZADD", users, "+inf", _OFFLINE), ("PERSIST", about), ("PERSIST", users)]
        self.server.execute(*commands)

    def release(self) -> None:
        """Release the lease. The last process of an active data set deletes it."""
        if not self._held or os.getpid() != self._pid:
            return
        self._held = False
        with contextlib.suppress(Unavailable):
            self.server.execute(("ZREM", _key(self.server, self.name, "leases"), self._holder))
            _remove_unused(self.server, self.name)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_pid": None}


def sample_key(server: Server, name: str, id: int) -> bytes:
    return _key(server, name, id).encode()


def held(server: Server) -> list[Held]:
    """Return the data sets on the server. Raises Unavailable."""
    names = server.execute(("SMEMBERS", _names(server)))[0]
    return [_held(server, name.decode()) for name in sorted(names)]


def remove(server: Server, name: str, log: Callable[[int], object] = lambda samples: None) -> None:
    """Delete a data set: its samples and its records.

    log: called with the number of samples deleted since its last call. Raises Unavailable.
    """
    ask(server, name, "UNLINK", np.arange(_held(server, name).samples), log)
    server.execute(*(("UNLINK", _key(server, name, of)) for of in _RECORDS))
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
        for each in held(server):
            if each.mode == "active" and not each.leases:
                _remove_unused(server, each.name)


def _remove_unused(server: Server, name: str) -> None:
    users = _key(server, name, "leases")
    _, number = server.execute(("ZREMRANGEBYSCORE", users, "-inf", server.time()), ("ZCARD", users))
    if number == 0:
        remove(server, name)


def _held(server: Server, name: str) -> Held:
    now = server.time()
    about, ends = server.execute(
        ("HGETALL", _key(server, name, "about")),
        ("ZRANGE", _key(server, name, "leases"), 0, -1, "WITHSCORES"),
    )
    users = dict(zip(ends[::2], map(float, ends[1::2]), strict=True))
    mode = "active" if users.pop(_OFFLINE, None) is None else "offline"
    alive = [(holder.decode(), end - now) for holder, end in users.items() if end > now]
    return Held(name, about.get(b"title", b"").decode(), int(about.get(b"samples", 0)), mode, alive)


def _key(server: Server, name: str, of: str | int) -> str:
    return f"{server.address.prefix}:{name}:{of}"


def _names(server: Server) -> str:
    return f"{server.address.prefix}:names"
