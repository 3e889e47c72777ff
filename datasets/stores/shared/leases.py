"""Who uses a data set of a shared cache, what is known of it, and when it goes.

Every process of a job that reads a data set gives a sign of life every few seconds: a member of a sorted set
whose score is the server's time LEASE seconds later. Whoever lets go and finds nobody else takes an active
data set away: the keys follow from the number of samples, nothing is searched for. A killed job is nobody
once its lease has run out; what it left goes with the next job that uses the server, or after LEFT at the
latest, because samples of an active data set do not live longer (a longer job puts them once more).
"""

import contextlib
import os
import secrets
import socket
from typing import NamedTuple

from datasets.stores.shared import wire
from datasets.stores.shared.servers import GROUPS, TAGS, Servers, Unavailable

LEASE = 60  # seconds
LEFT = 12 * 3600  # seconds
_TOGETHER = 500  # keys a command
_KEPT = ("meta", "leases", "counts")  # of a data set, beside its samples


class Held(NamedTuple):
    """A data set on the servers. name: "<fingerprint>:<form>". samples: of the data set, put or not. mode:
    "active" or "offline". leases: (host:process:number, seconds left). counts: hits, misses, bad, errors and
    put of all processes since it was begun."""

    name: str
    title: str
    samples: int
    mode: str
    leases: list[tuple[str, float]]
    counts: dict[str, int]


@contextlib.contextmanager
def _answers():
    """Turn an answer of another form than that of Redis into Unavailable."""
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        raise Unavailable(f"this is not an answer of Redis: {error}") from error


class Lease:
    """title: what people call the data set. mode: "active", "offline", or "" to hold no lease."""

    def __init__(self, servers: Servers, name: str, samples: int, mode: str, title: str):
        self.servers, self.name, self.samples, self.mode, self.title = servers, name, samples, mode, title
        self._holder, self._pid = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}", os.getpid()
        self.stays, self._held = False, False

    def beat(self, counts: dict[str, int]) -> bool:
        """A sign of life, and what to add to the counts; False where the server cannot be asked now. Only the
        process that made this holds the lease: a worker of its DataLoader sends its counts. A tool leaves no
        trace."""
        if not self.mode:
            return True
        holds = self.mode and os.getpid() == self._pid
        try:
            server = self.servers.at(self.name)
            if holds and self.mode == "active":
                self.announce("active", keep=True)
            answers = server.execute(
                ("HGET", self._key("meta"), "mode"),
                *(("HINCRBY", self._key("counts"), name, number) for name, number in counts.items()),
                *([("ZADD", self._key("leases"), _now(server) + LEASE, self._holder)] if holds else []),
            )
            self.stays = answers[0] == b"offline"  # known before anything is given an end
            ending = ("PERSIST",) if self.stays else ("EXPIRE", 2 * LEFT)
            server.execute(*((ending[0], self._key(of), *ending[1:]) for of in _KEPT))
        except Unavailable:
            return False
        self._held = holds
        return True

    def announce(self, mode: str, keep: bool = False) -> None:
        """Make the data set known. keep: a mode that it has already stays. Raises Unavailable."""
        meta = self._key("meta")
        if not keep:
            self.stays = mode == "offline"
        self.servers.at(self.name).execute(
            ("HSET", meta, "samples", self.samples, "title", self.title),
            ("HSETNX" if keep else "HSET", meta, "mode", mode),
            *((("PERSIST", self._key(of)) for of in _KEPT) if self.stays else ()),
        )
        sets = _sets(self.servers)
        self.servers.at(sets).execute(("SADD", sets, self.name))

    def release(self) -> None:
        """The last one of an active data set takes it away."""
        if not self._held or os.getpid() != self._pid:
            return
        self._held = False
        with contextlib.suppress(Unavailable):
            server = self.servers.at(self.name)
            server.execute(("ZREM", self._key("leases"), self._holder))
            _take_away_unused(self.servers, self.name)

    def _key(self, of: str) -> str:
        return key(self.servers, self.name, of)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_pid": None}


def key(servers: Servers, name: str, of: str) -> str:
    return f"{servers.address.prefix}:{{{name}}}:{of}"


def sample_key(servers: Servers, name: str, id: int) -> bytes:
    return f"{servers.address.prefix}:{name}:{{{TAGS[id % GROUPS]}}}:{id}".encode()


@_answers()
def held(servers: Servers) -> list[Held]:
    """The data sets on the servers. Raises Unavailable."""
    sets = _sets(servers)
    names = _checked(servers.at(sets).execute(("SMEMBERS", sets))[0])
    return [_held(servers, name.decode()) for name in sorted(names)]


def remove(servers: Servers, name: str, tell=lambda samples: None) -> None:
    """Take a data set away: its samples, and what is known of it. tell: takes how many went at a time. Raises
    Unavailable."""
    samples = _held(servers, name).samples
    for group in range(min(GROUPS, samples)):
        server, ids = servers.at(TAGS[group]), range(group, samples, GROUPS)
        for first in range(0, len(ids), _TOGETHER):
            keys = [sample_key(servers, name, id) for id in ids[first : first + _TOGETHER]]
            _checked(server.execute(("UNLINK", *keys))[0])
            tell(len(keys))
    sets = _sets(servers)
    servers.at(name).execute(("UNLINK", *(key(servers, name, of) for of in _KEPT)))
    servers.at(sets).execute(("SREM", sets, name))


def sweep(servers: Servers) -> None:
    """Take away what killed jobs have left."""
    with contextlib.suppress(Unavailable):
        for each in held(servers):
            if not each.leases:
                _take_away_unused(servers, each.name)


@_answers()
def _take_away_unused(servers: Servers, name: str) -> None:
    server, leases = servers.at(name), key(servers, name, "leases")
    now = _now(server)
    *_, (_, number, mode) = server.execute(  # together: of two that let go at a time one is the last
        ("MULTI",),
        ("ZREMRANGEBYSCORE", leases, "-inf", now),
        ("ZCARD", leases),
        ("HGET", key(servers, name, "meta"), "mode"),
        ("EXEC",),
    )
    if number == 0 and mode != b"offline":
        remove(servers, name)


@_answers()
def _held(servers: Servers, name: str) -> Held:
    server = servers.at(name)
    now = _now(server)
    answers = server.execute(
        ("HGETALL", key(servers, name, "meta")),
        ("ZRANGE", key(servers, name, "leases"), 0, -1, "WITHSCORES"),
        ("HGETALL", key(servers, name, "counts")),
    )
    meta, leases, counts = (
        dict(zip(words[::2], words[1::2], strict=True))
        for words in ([word.decode() for word in _checked(answer)] for answer in answers)
    )
    alive = [(holder, float(until) - now) for holder, until in leases.items() if float(until) > now]
    numbers = {of: int(number) for of, number in counts.items()}
    return Held(
        name, meta.get("title", ""), int(meta.get("samples", 0)), meta.get("mode", ""), alive, numbers
    )


@_answers()
def _now(server) -> float:
    """The server's clock, seconds: those of the nodes may differ."""
    seconds, microseconds = _checked(server.execute(("TIME",))[0])
    return int(seconds) + int(microseconds) / 1e6


def _checked(answer):
    if isinstance(answer, wire.Refused):
        raise Unavailable(str(answer))
    return answer


def _sets(servers: Servers) -> str:
    return f"{servers.address.prefix}:sets"
