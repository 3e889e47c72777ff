"""The servers of a shared cache, as one process sees them: a fault of theirs is a miss that costs little.

A server that fails once is left alone; a thread in the background tries what failed, and when that works the
server is asked again. The one who needs samples waits once for a server that falls silent, not once a batch.
"""

import binascii
import bisect
import collections
import contextlib
import os
import ssl
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

from common.exits import BadInput, import_optional
from datasets.stores.shared import address as addresses
from datasets.stores.shared import wire

GROUPS = 128  # of keys that lie on one node, evenly over the slots of a Cluster
_SLOTS, _STRIDE = 16384, 79  # the stride: odd, near the golden ratio of GROUPS
_TICK = 0.5  # seconds between looks of the background thread
_PAUSE, _LONGEST_PAUSE = 0.5, 10.0  # seconds before a server is tried again: doubled each time
_WORTH = 200  # a server whose failure cost c seconds is left alone until it has been well, or away, for 200 c
_TOGETHER = 500  # commands sent at a time
_CONNECTIONS = 8  # kept for each server


_CURE = (
    f"the user stands in --cache redis://USER@..., the password in the environment, {addresses.PASSWORD} or "
    f"{addresses.PASSWORD_FILE}"
)


class Unavailable(Exception):
    """The server cannot be asked now. The message says why."""


def slot(tag: str) -> int:
    """Of the 16384 of a Cluster. Source: Redis Cluster specification, CRC16 XMODEM."""
    return binascii.crc_hqx(tag.encode(), 0) % _SLOTS


def _tags() -> list[str]:
    """A hash tag for each group: numbers whose slots are as evenly spread as can be, also those of a few
    groups that follow each other."""
    tags, number = {}, 0
    while len(tags) < GROUPS:
        tags.setdefault(slot(str(number)) * GROUPS // _SLOTS, str(number))
        number += 1
    return [tags[group * _STRIDE % GROUPS] for group in range(GROUPS)]


TAGS = _tags()


class Server:
    """host, port; connect(): a Wire. `down`: None, or why it is not asked. `full_until`: when to put again
    into a server that had no room (time.monotonic())."""

    def __init__(self, host: str, port: int, connect, say):
        self.host, self.port, self.name = host, port, addresses.named(host, port)
        self.down: str | None = None
        self.refused = False  # the password
        self.full_until, self.full_pause = 0.0, 0.0
        self._connect, self._say = connect, say
        self._idle: collections.deque[wire.Wire] = collections.deque()
        self._lock = threading.Lock()
        self._well_since, self._retry_at, self._pause, self._failed = -1e9, 0.0, _PAUSE, None

    def execute(self, *commands: tuple) -> list:
        """The answers to some commands, in order: bytes, int, None, lists of these, wire.Refused.

        Raises Unavailable.
        """
        pieces = [wire.packed(*command) for command in commands]
        answers = []
        for first in range(0, len(pieces), _TOGETHER):
            part = pieces[first : first + _TOGETHER]
            answers += self._ask(lambda connection, part=part: connection.ask(part))
        return answers

    def slots(self) -> list[tuple[int, int, str, int]] | wire.Refused:
        """(first, last, host, port) of each range of slots; Refused if the server is not part of a Cluster.

        Raises Unavailable, also if the answer has another form: then the server is not Redis.
        """
        return self._ask(_slots, _slots)

    def values(self, groups: list[list[bytes]], lengths: list[int], buffer: bytearray) -> list:
        """As Wire.values(). Raises Unavailable."""
        return self._ask(
            lambda connection: connection.values(groups, lengths, buffer),
            lambda connection: connection.values(groups, lengths, bytearray(wire.room(lengths))),
        )

    def close(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def try_again(self, key: str | None) -> None:
        """In the background: does what failed work now? key: one that lies here, if there is any."""
        if time.monotonic() < self._retry_at:
            return
        try:
            connection = self._connect(self.host, self.port)
            connection.ask([wire.packed("MGET", key) if key else wire.packed("PING")])
            if self._failed:
                self._failed(connection)
        except _errors() as error:
            self._retry_at, self._pause = time.monotonic() + self._pause, min(2 * self._pause, _LONGEST_PAUSE)
            self.down = _text(error)
            return
        self._idle.append(connection)
        self.down, self._failed, self._well_since, self._pause = None, None, time.monotonic(), _PAUSE
        self._say(f"cache {self.name}: it answers again")

    def _ask(self, talk, again=None):
        """talk(connection), on a connection that nobody else has."""
        if self.down is not None:
            raise Unavailable(self.down)
        begin = time.monotonic()
        while True:
            connection = used = None
            try:
                with contextlib.suppress(IndexError):
                    connection = used = self._idle.pop()
                connection = connection or self._connect(self.host, self.port)
                answer = talk(connection)
            except _errors() as error:
                if connection:
                    connection.close()
                if used and not isinstance(error, TimeoutError | wire.Refused):
                    self.close()  # closed since it was last used: so are the others
                    continue
                self._fail(error, time.monotonic() - begin, again)
                raise Unavailable(self.down) from None
            except BaseException:
                if connection:
                    connection.close()
                raise
            if len(self._idle) < _CONNECTIONS:
                self._idle.append(connection)
            else:
                connection.close()
            return answer

    def _fail(self, error: Exception, cost: float, again) -> None:
        with self._lock:
            if self.down is not None:
                return
            self.refused = _is_about_the_password(error)
            now = time.monotonic()
            often = now - self._well_since < _WORTH * cost
            self._retry_at, self._pause = now + (_WORTH * cost if often else _PAUSE), _PAUSE
            self._failed = again
            self.down = _text(error)
        self.close()
        self._say(f"cache {self.name}: {self.down}; samples come from the next tier until it answers again")


class Servers:
    """The servers of an Address. say: takes a line of text; only the process that made this speaks.

    Threads may share one. After a fork, and after it was pickled, it connects anew. Raises BadInput where the
    user or the password is wrong, or where several hosts are no Cluster; anything else that does not work is
    said, and tried again in the background. `cluster`: keys may be asked for together only where they share a
    hash tag. cure: what to do about a wrong user or password, the end of that message.
    """

    def __init__(self, address: addresses.Address, say=print, cure: str = _CURE):
        self.address, self._say, self._owner = address, say, os.getpid()
        self._begin()
        with ThreadPoolExecutor(len(self._all)) as pool:  # each may take its time-outs
            list(pool.map(self._first, list(self._all.values())))
        for server in self._all.values():
            if server.refused:
                raise BadInput(f"cache {server.name}: {server.down}; {cure}")
        self._look_around(start=True)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self):
        return iter(list(self._all.values()))

    def at(self, tag: str) -> Server:
        """Where keys with this hash tag lie. Raises Unavailable."""
        place = bisect.bisect(self._firsts, slot(tag)) - 1
        if place < 0 or self._ranges[place][1] < slot(tag):
            raise Unavailable("no node of the Cluster has these keys")
        return self._ranges[place][2]

    def say(self, text: str) -> None:
        if os.getpid() == self._owner:  # else each of the DataLoader's workers would say it
            self._say(text)

    def each_tick(self, function) -> None:
        """Call function() in the background twice a second, and once more when this is closed."""
        self._functions.append(function)
        self.wake()

    def up(self, group: int) -> Server | None:
        """Where the keys of a group lie, at no cost; None where that is not to be asked now."""
        server = self._groups[group]
        if server is not None and server.down is None:
            return server
        self.begin()
        return None

    def begin(self) -> None:
        """See to it that the background thread of this process runs."""
        if self._thread is None:
            self.wake()

    def wake(self) -> None:
        """Begin the next look of the background thread now."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="cache", daemon=True)
                self._thread.start()
        self._awake.set()

    def moved(self) -> None:
        """A node does not have what it should: ask in the background where it is."""
        self._stale = True
        self.wake()

    def close(self) -> None:
        """Ends the thread and the connections. Usable again after it."""
        thread, self._closing = self._thread, True
        if thread:
            self._awake.set()
            thread.join(10)
        for server in self:
            server.close()
        self._thread, self._closing, self._functions = None, False, []

    def __getstate__(self) -> dict:
        return {"address": self.address}

    def __setstate__(self, state: dict) -> None:
        self.address, self._say, self._owner = state["address"], None, None
        self._begin()
        self._look_around()

    def _begin(self) -> None:
        self._password = addresses.password()
        self._all = {host: self._server(*host) for host in self.address.hosts}
        self._ranges = [(0, _SLOTS - 1, next(iter(self._all.values())))]
        self._firsts, self._known, self._look_at, self.cluster = [0], False, 0.0, False
        self._groups: list[Server | None] = [self._ranges[0][2]] * GROUPS
        self._renew()
        _every.add(self)

    def _renew(self) -> None:
        """Also in a forked child, where nothing of the parent's threads, locks and sockets may be used."""
        for server in self._all.values():
            server._idle, server._lock = collections.deque(), threading.Lock()
        self._thread, self._functions, self._stale, self._closing = None, [], False, False
        self._lock, self._awake = threading.Lock(), threading.Event()

    def _server(self, host: str, port: int) -> Server:
        return Server(host, port, self._connect, self.say)

    def _connect(self, host: str, port: int) -> wire.Wire:
        try:
            return self._connect_as(self.address.user, host, port)
        except _errors() as error:
            if not (self.address.or_default and _is_about_the_password(error)):
                raise
        connection = self._connect_as("default", host, port)
        self.address = self.address._replace(user="default", or_default=False)
        self.say(f"cache {addresses.named(host, port)}: it refuses the user, so the user default is used")
        return connection

    def _connect_as(self, user: str | None, host: str, port: int) -> wire.Wire:
        redis = _redis()
        options = {
            "host": host, "port": port, "db": self.address.database, "protocol": 2,
            "username": user, "password": self._password,
            "socket_connect_timeout": wire.CONNECT, "socket_timeout": wire.READ, "socket_keepalive": True,
        }  # fmt: skip
        if not self.address.tls:
            return wire.Wire(redis.Connection(**options))
        secured = {"ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_ca_certs": self.address.ca}
        return wire.Wire(redis.SSLConnection(**options, **secured))

    def _first(self, server: Server) -> None:
        with contextlib.suppress(Unavailable):
            answer = server.execute(("PING",))[0]
            if isinstance(answer, wire.Refused):
                self.say(f"cache {server.name}: {answer}")

    def _look_around(self, start: bool = False) -> None:
        """Which node has which slots."""
        self._look_at, self._stale = time.monotonic() + 1, False
        for server in self:
            try:
                answer = server.slots()
            except Unavailable:
                continue
            self._known = True
            if isinstance(
                answer, wire.Refused
            ):  # no Cluster; if it is one and may not be asked, MOVED says so
                if start and len(self.address.hosts) > 1:
                    raise BadInput(f"cache {self.address}: {server.name} is no node of a Cluster: {answer}")
                return
            if start and self.address.database:
                raise BadInput(f"cache {self.address} is a Cluster: there is no /{self.address.database}")
            self.cluster = True
            found = {}
            ranges = []
            for first, last, name, port in answer:
                host = (server.host if name in ("", "?") else name), port
                found[host] = self._all.get(host) or self._server(*host)
                ranges.append((first, last, found[host]))
            ranges.sort(key=lambda each: each[0])
            # those that were named stay, to be asked again when all others are gone
            self._all = {host: self._all[host] for host in self.address.hosts} | found
            self._ranges, self._firsts = ranges, [first for first, _, _ in ranges]
            self._groups = [None] * GROUPS
            for group, tag in enumerate(TAGS):
                with contextlib.suppress(Unavailable):
                    self._groups[group] = self.at(tag)
            return

    def _key_at(self, server: Server) -> str | None:
        """A node that has just begun answers a PING before it answers for its keys."""
        if server not in self._groups:
            return None
        return f"{self.address.prefix}:{{{TAGS[self._groups.index(server)]}}}"

    def _work(self) -> None:
        while not self._closing:
            self._awake.wait(_TICK)
            self._awake.clear()
            self._tick()
        self._tick()

    def _tick(self) -> None:
        try:
            for server in self:
                if server.down is not None:
                    server.try_again(self._key_at(server))
            down = any(server.down for server in self)
            stale = self._stale or not self._known or (down and len(self) > 1)
            if stale and time.monotonic() > self._look_at:
                self._look_around()
            for function in list(self._functions):
                function()
        except Exception as error:  # nothing in the background may end the training, nor the thread
            self.say(f"cache {self.address}: {_text(error)}")


_every = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [each._renew() for each in list(_every)])


def _slots(connection: wire.Wire) -> list[tuple[int, int, str, int]] | wire.Refused:
    """As Server.slots()."""
    (answer,) = connection.ask([wire.packed("CLUSTER", "SLOTS")])
    if isinstance(answer, wire.Refused):
        return answer
    try:
        found = [(int(a), int(b), (main[0] or b"").decode(), int(main[1])) for a, b, main, *_ in answer]
    except (TypeError, ValueError, AttributeError, LookupError):
        found = []
    if not found or not all(0 <= a <= b < _SLOTS and 0 < port < 65536 for a, b, _, port in found):
        raise ConnectionError(f"this is not Redis: the answer to CLUSTER SLOTS is {answer!r:.60}")
    return found


def _redis():
    return import_optional("redis", "a shared cache needs redis-py", "'redis[hiredis]'")


def _errors() -> tuple:
    return _redis().RedisError, OSError, wire.Refused, ValueError, RecursionError


def _is_about_the_password(error: Exception) -> bool:
    if isinstance(error, wire.Refused):
        return error.code in ("NOAUTH", "WRONGPASS")
    # redis-py's own text: AUTH was answered neither by OK nor by an error, so this is not Redis
    return isinstance(error, _redis().AuthenticationError) and "Invalid Username" not in str(error)


def _text(error: Exception) -> str:
    """One line, without what a server may repeat of the password."""
    if _is_about_the_password(error):
        return "it refuses the user or the password"
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ssl.SSLError) or "certificate" in text.lower():
        text = f"its certificate is not trusted: {text}"
    secret = None
    with contextlib.suppress(BadInput):
        secret = addresses.password()
    return (text.replace(secret, "***") if secret else text)[:300]
