"""Leases: register the users of a data set in a shared cache, and delete the data set after the last one.

Every process of a job that reads a data set sends a heartbeat every few seconds. It is a member of a sorted
set with the score "server time + LEASE". The last process that releases its lease deletes an active data
set; the keys follow from the number of samples, without a search. The lease of a killed job expires, and the
next job that uses the server deletes the data. Samples of an active data set also expire after LEFT seconds
at the latest (a longer job puts them again).
"""

import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from datasets.stores.shared.servers import GROUPS, TAGS, Server, Servers, Unavailable

LEASE = 60  # seconds
LEFT = 12 * 3600  # seconds
_KEYS = 500  # in a command
_RECORDS = ("meta", "leases", "counts")  # the keys of a data set in addition to its samples


class Held(NamedTuple):
    """A data set on the servers.

    name: "<fingerprint>:<form>".
    title: the name for users.
    samples: number of samples of the data set, stored or not.
    mode: "active" or "offline".
    leases: (host:process:token, seconds left) of each lease.
    counts: hits, misses, bad, errors and put of all processes since the first job.
    """

    name: str
    title: str
    samples: int
    mode: str
    leases: list[tuple[str, float]]
    counts: dict[str, int]


class Lease:
    """The lease of a process. title: the data set's name for users. mode: "active", "offline", "": none."""

    def __init__(self, servers: Servers, name: str, samples: int, mode: str, title: str):
        self.servers, self.name, self.samples, self.mode, self.title = servers, name, samples, mode, title
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._pid: int | None = os.getpid()
        self.stays, self._held = False, False

    def beat(self, counts: dict[str, int]) -> bool:
        """Send a heartbeat and add to the counts. Return False if the server cannot be asked now.

        Only the process that created this object holds the lease; its DataLoader's workers send only counts.
        Without a mode (tools) nothing is sent.
        """
        if not self.mode:
            return True
        holds = os.getpid() == self._pid
        try:
            server = self.servers.at(self.name)
            if holds and self.mode == "active":
                self.announce("active", keep=True)
            lease = [("ZADD", self._key("leases"), _now(server) + LEASE, self._holder)] if holds else []
            added = [("HINCRBY", self._key("counts"), name, number) for name, number in counts.items()]
            mode, *_ = server.execute(("HGET", self._key("meta"), "mode"), *added, *lease)
            self.stays = mode == b"offline"  # before any key gets an expiry time
            end = ("PERSIST",) if self.stays else ("EXPIRE", 2 * LEFT)
            server.execute(*((end[0], self._key(of), *end[1:]) for of in _RECORDS))
        except Unavailable:
            return False
        self._held = holds
        return True

    def announce(self, mode: str, keep: bool = False) -> None:
        """Register the data set on the servers. keep: do not change an existing mode. Raises Unavailable."""
        meta = self._key("meta")
        if not keep:
            self.stays = mode == "offline"
        self.servers.at(self.name).execute(
            ("HSET", meta, "samples", self.samples, "title", self.title),
            ("HSETNX" if keep else "HSET", meta, "mode", mode),
            *((("PERSIST", self._key(of)) for of in _RECORDS) if self.stays else ()),
        )
        sets = _sets(self.servers)
        self.servers.at(sets).execute(("SADD", sets, self.name))

    def release(self) -> None:
        """Release the lease. The last process of an active data set deletes it."""
        if not self._held or os.getpid() != self._pid:
            return
        self._held = False
        with contextlib.suppress(Unavailable):
            self.servers.at(self.name).execute(("ZREM", self._key("leases"), self._holder))
            _remove_unused(self.servers, self.name)

    def _key(self, of: str) -> str:
        return _key(self.servers, self.name, of)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_pid": None}


def sample_key(servers: Servers, name: str, id: int) -> bytes:
    return f"{servers.address.prefix}:{name}:{{{TAGS[id % GROUPS]}}}:{id}".encode()


def held(servers: Servers) -> list[Held]:
    """Return the data sets on the servers. Raises Unavailable."""
    sets = _sets(servers)
    names = servers.at(sets).execute(("SMEMBERS", sets))[0]
    return [_held(servers, name.decode()) for name in sorted(names)]


def remove(servers: Servers, name: str, log: Callable[[int], object] = lambda samples: None) -> None:
    """Delete a data set: its samples and its records.

    log: called with the number of samples deleted since its last call. Raises Unavailable.
    """
    samples = _held(servers, name).samples
    for group in range(min(GROUPS, samples)):
        server, ids = servers.at(TAGS[group]), range(group, samples, GROUPS)
        for first in range(0, len(ids), _KEYS):
            keys = [sample_key(servers, name, id) for id in ids[first : first + _KEYS]]
            server.execute(("UNLINK", *keys))
            log(len(keys))
    sets = _sets(servers)
    servers.at(name).execute(("UNLINK", *(_key(servers, name, of) for of in _RECORDS)))
    servers.at(sets).execute(("SREM", sets, name))


def ask(
    servers: Servers,
    name: str,
    command: str,
    ids: np.ndarray,
    log: Callable[[int], object] = lambda count: None,
) -> np.ndarray:
    """Return a command's answer for each sample of a data set, int64 [n]; -1: a value of another type.

    log: called with the number of samples requested since its last call. Raises Unavailable.
    """
    found = np.full(len(ids), -1, np.int64)
    for group in range(GROUPS):
        places = np.flatnonzero(ids % GROUPS == group)
        if len(places):
            commands = ((command, sample_key(servers, name, id)) for id in ids[places].tolist())
            answers = servers.at(TAGS[group]).execute(*commands, errors=True)
            for place, answer in zip(places, answers, strict=True):
                if isinstance(answer, int):
                    found[place] = answer
                elif not str(answer).startswith("WRONGTYPE"):
                    raise Unavailable(str(answer))
            log(len(places))
    return found


def sweep(servers: Servers) -> None:
    """Delete the data sets that killed jobs have left."""
    with contextlib.suppress(Unavailable):
        for each in held(servers):
            if not each.leases:
                _remove_unused(servers, each.name)


def _remove_unused(servers: Servers, name: str) -> None:
    server, leases = servers.at(name), _key(servers, name, "leases")
    _, number, mode = server.execute(
        ("ZREMRANGEBYSCORE", leases, "-inf", _now(server)),
        ("ZCARD", leases),
        ("HGET", _key(servers, name, "meta"), "mode"),
        transaction=True,  # the number of leases and the mode at the same moment
    )
    if number == 0 and mode != b"offline":
        remove(servers, name)


def _held(servers: Servers, name: str) -> Held:
    server = servers.at(name)
    now = _now(server)
    leases = _key(servers, name, "leases")
    meta, until, counts = server.execute(
        ("HGETALL", _key(servers, name, "meta")),
        ("ZRANGE", leases, 0, -1, "WITHSCORES"),
        ("HGETALL", _key(servers, name, "counts")),
    )
    meta = {field.decode(): value.decode() for field, value in meta.items()}
    alive = [
        (holder.decode(), float(end) - now)
        for holder, end in zip(until[::2], until[1::2], strict=True)
        if float(end) > now
    ]
    numbers = {field.decode(): int(number) for field, number in counts.items()}
    samples = int(meta.get("samples", 0))
    return Held(name, meta.get("title", ""), samples, meta.get("mode", ""), alive, numbers)


def _now(server: Server) -> float:
    """Return the server's time in seconds. The clocks of the nodes may differ."""
    seconds, microseconds = server.execute(("TIME",))[0]
    return seconds + microseconds / 1e6


def _key(servers: Servers, name: str, of: str) -> str:
    return f"{servers.address.prefix}:{{{name}}}:{of}"


def _sets(servers: Servers) -> str:
    return f"{servers.address.prefix}:sets"
