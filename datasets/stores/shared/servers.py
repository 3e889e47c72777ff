"""The servers of a shared cache: one redis-py client for each node, and the handling of failures.

A server that fails is not asked any more; a background thread repeats the failed request until it works. So
a job waits once for a server that stops answering, not once for each batch. (redis-py's RedisCluster fails a
whole batch when one node is down, and needs rights that a user of the cache does not have.)
"""

import binascii
import contextlib
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from common.exits import BadInput, import_optional
from datasets.stores.shared import address as addresses

GROUPS = 128  # groups of keys: each is on one node, and they are evenly spread over a Cluster's slots
CONNECT, READ = 1.0, 1.0  # seconds to connect; seconds without a byte
_SLOWEST = 20e6  # bytes/s: reading the files is faster than that
_SLOTS, _STRIDE = 16384, 79  # the stride: odd, near the golden ratio of GROUPS
_TICK = 0.5  # seconds between two rounds of the background thread
_PAUSE, _LONGEST_PAUSE = 0.5, 10.0  # seconds before a server is tried again: doubled each time
_WORTH = 200  # after a failure of c seconds, a server that worked for less than 200 c is not used for 200 c
_COMMANDS = 500  # sent at a time
_NODES = 8  # asked at a time

_CURE = (
    f"give the user in --cache redis://USER@..., and the password in {addresses.PASSWORD} or "
    f"{addresses.PASSWORD_FILE}"
)


class Unavailable(Exception):
    """The server cannot be asked now or refuses a command. The message contains the reason."""


def slot(tag: str) -> int:
    """Return the slot of a hash tag in a Cluster, 0 to 16383: CRC16 XMODEM, as Redis specifies."""
    return binascii.crc_hqx(tag.encode(), 0) % _SLOTS


def _tags() -> list[str]:
    """Return a hash tag for each group. Their slots are evenly spread, also those of consecutive groups."""
    tags, number = {}, 0
    while len(tags) < GROUPS:
        tags.setdefault(slot(str(number)) * GROUPS // _SLOTS, str(number))
        number += 1
    return [tags[group * _STRIDE % GROUPS] for group in range(GROUPS)]


TAGS = _tags()


class _Limited:
    """A socket that raises TimeoutError after the thread's deadline. redis-py limits only single calls."""

    thread = threading.local()

    def __init__(self, socket: Any):
        self._socket = socket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv_into(self, *arguments) -> int:
        if time.monotonic() > self.thread.end:
            raise TimeoutError("too slow")
        return self._socket.recv_into(*arguments)


class Server:
    """One server. Threads may share it.

    connect: called with (host, port), returns a redis.Redis.
    key: a key that the user is allowed to read.
    log: called with one line of text.
    `down`: the reason why the server is not asked, or None.
    `full_until`: time.monotonic() of the next put into a server that was full.
    """

    def __init__(self, host: str, port: int, connect: Callable, key: str, log: Callable[[str], None]):
        self.host, self.port, self.name = host, port, addresses.named(host, port)
        self.down: str | None = None
        self.refused = False  # the user or the password
        self.full_until, self.full_pause = 0.0, 0.0
        self._connect, self._key, self._log = connect, key, log
        self._well_since, self._retry_at, self._pause = -1e9, 0.0, _PAUSE
        self._failed: Callable | None = None
        self.renew()

    def renew(self) -> None:
        """Forget the connections and the lock: a forked process may not use those of its parent."""
        self._client, self._lock = None, threading.Lock()

    def call(self, talk: Callable, size: int = 0, again: bool = False) -> Any:
        """Return talk(client), with a redis.Redis. size: bytes of the answers.

        again: repeat `talk` in the background after any error, until it works. Raises Unavailable.
        """
        if self.down is not None:
            raise Unavailable(self.down)
        begin = time.monotonic()
        try:
            return self._talk(talk, size)
        except Exception as error:  # an answer that is not in Redis' protocol may raise any exception
            if _is_about_one_command(error) and not again:
                raise Unavailable(_text(error)) from None
            self._fail(error, time.monotonic() - begin, talk if again else None)
            raise Unavailable(self.down) from None

    def execute(self, *commands: tuple, transaction: bool = False, errors: bool = False) -> list:
        """Return redis-py's answers to some commands.

        transaction: run all commands or none. errors: return a redis.ResponseError in the place of an answer,
        instead of raising Unavailable. Raises Unavailable.
        """
        answers = []
        for first in range(0, len(commands), _COMMANDS):

            def talk(client: Any, part: tuple[tuple, ...] = commands[first : first + _COMMANDS]) -> list:
                pipeline = client.pipeline(transaction)
                for command in part:
                    pipeline.execute_command(*command)
                return pipeline.execute(raise_on_error=not errors)

            answers += self.call(talk)
        return answers

    def memory(self) -> dict:
        """Return `used_memory` and `maxmemory` (bytes), `maxmemory_policy` and more; {} if the server refuses
        the command. Raises Unavailable."""
        answer = self.execute(("INFO", "memory"), errors=True)[0]
        return answer if isinstance(answer, dict) else {}

    def try_again(self) -> None:
        """Repeat the failed request of a server that is down, if its pause is over."""
        if time.monotonic() < self._retry_at:
            return

        def probe(client: Any) -> None:
            with contextlib.suppress(load_redis().exceptions.AskError):  # another node has the key
                client.mget([self._key])  # a node that has just started answers PING earlier than MGET

        try:
            self._talk(self._failed or probe)
        except Exception as error:
            self._fail(error)
            return
        self.down, self._failed, self._well_since = None, None, time.monotonic()
        self._log(f"cache {self.name}: it answers again")

    def close(self, idle_only: bool = False) -> None:
        if self._client:
            self._client.connection_pool.disconnect(inuse_connections=not idle_only)

    def _talk(self, talk: Callable, size: int = 0):
        _Limited.thread.end = time.monotonic() + CONNECT + READ + size / _SLOWEST
        with self._lock:
            if self._client is None:
                self._client = self._connect(self.host, self.port)
        return talk(self._client)

    def _fail(self, error: Exception, cost: float | None = None, again: Callable | None = None) -> None:
        """Mark the server as down. cost: seconds that a job has waited; None in the background."""
        with self._lock:
            now, first = time.monotonic(), self.down is None
            if cost is None:
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            elif not first:
                return
            else:
                often = now - self._well_since < _WORTH * cost
                self._pause = _WORTH * cost if often else _PAUSE
                self._failed, self.refused = again, _is_about_the_password(error)
            slow = f"the answer came more slowly than {_SLOWEST / 1e6:.0f} MB/s"
            self.down = slow if now > _Limited.thread.end else _text(error)
            self._retry_at = now + self._pause
        self.close(idle_only=True)  # idle connections may be broken too, or receive a late answer
        if first:
            text = "samples come from the next tier until it answers again"
            self._log(f"cache {self.name}: {self.down}; {text}")


class Servers:
    """The servers of an Address. Threads may share it; after a fork or pickling it opens new connections.

    log: called with one line of text, only in the process that created this object.
    cure: the end of the error message for a wrong user or password.
    `cluster`: whether only keys of one hash tag can be requested together.
    `threads`: to ask several nodes at a time.
    Raises BadInput if the user or the password is wrong, if several hosts are not a Cluster, or if a Cluster
    has a database number. Any other error is logged, and the server is tried again in the background.
    """

    _thread: threading.Thread | None
    _functions: list[Callable[[], None]]
    _lock: threading.Lock
    _awake: threading.Event
    threads: ThreadPoolExecutor

    def __init__(self, address: addresses.Address, log: Callable[[str], None] = print, cure: str = _CURE):
        self._open(address, log, os.getpid())
        answers = list(self.threads.map(_ask_slots, self))  # in parallel: each may wait for its time-outs
        for server in self:
            if server.refused:
                raise BadInput(f"cache {server.name}: {server.down}; {cure}")
        error = self._take_slots(zip(self, answers, strict=True))
        if error and len(address.hosts) > 1:
            raise BadInput(f"cache {address}: its hosts are not nodes of one Cluster: {error}")
        if self.cluster and address.database:
            raise BadInput(f"cache {address} is a Cluster, without databases: remove /{address.database}")

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Server]:
        return iter(list(self._all.values()))

    def at(self, tag: str) -> Server:
        """Return the server of the keys with a hash tag. Raises Unavailable."""
        for first, last, server in self._ranges:
            if first <= slot(tag) <= last:
                return server
        raise Unavailable("no node of the Cluster has these keys")

    def up(self, group: int) -> Server | None:
        """Return the server of a group's keys without a request; None if it is down or not known."""
        server = self._groups[group]
        return server if server is not None and server.down is None else None

    def log(self, text: str) -> None:
        if os.getpid() == self._owner:  # otherwise each of the DataLoader's workers would log it
            self._log(text)

    def each_tick(self, function: Callable[[], None]) -> None:
        """Call function() in the background twice a second, and once more in close().

        Call this first in a forked process: each process has its own background thread and connections.
        """
        if os.getpid() != self._pid:
            self._renew()
        self._functions.append(function)
        self.wake()

    def wake(self) -> None:
        """Start the next round of the background thread now."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="cache", daemon=True)
                self._thread.start()
        self._awake.set()

    def find_slots(self) -> None:
        """Ask in the background which node has which slots, because a key was not on the expected node."""
        self._stale = True
        self.wake()

    def close(self) -> None:
        """Stop the threads and close the connections."""
        self._closing = True
        if self._thread:
            self._awake.set()
            self._thread.join(10)
        for server in self:
            server.close()
        self.threads.shutdown()
        self._renew()

    def __getstate__(self) -> dict:
        return {"address": self.address}

    def __setstate__(self, state: dict) -> None:
        self._open(state["address"], print, 0)
        self._take_slots((server, _ask_slots(server)) for server in self)

    def _open(self, address: addresses.Address, log: Callable[[str], None], owner: int) -> None:
        load_redis()  # here, because the import takes as long as a server's time-out
        self.address, self._log, self._owner = address, log, owner
        self._password = addresses.password()
        self._all = {host: self._server(*host) for host in address.hosts}
        first = next(iter(self._all.values()))
        self._ranges = [(0, _SLOTS - 1, first)]
        self._groups: list[Server | None] = [first] * GROUPS
        self._known, self._look_at, self.cluster = False, 0.0, False
        self._renew()

    def _renew(self) -> None:
        """Forget the threads, locks and connections: a forked process may not use those of its parent."""
        for server in self:
            server.renew()
        self._pid, self._thread, self._functions = os.getpid(), None, []
        self._stale, self._closing = False, False
        self._lock, self._awake = threading.Lock(), threading.Event()
        self.threads = ThreadPoolExecutor(_NODES, "cache-node")

    def _server(self, host: str, port: int) -> Server:
        return Server(host, port, self._connect, f"{self.address.prefix}:0", self.log)

    def _connect(self, host: str, port: int):
        client = self._connect_as(self.address.user, host, port)
        if self.address.or_default:
            try:
                client.ping()
            except load_redis().AuthenticationError as error:
                if not _is_about_the_password(error):
                    raise
                client = self._connect_as("default", host, port)
                client.ping()
                self.address = self.address._replace(user="default", or_default=False)
                name = addresses.named(host, port)
                self.log(f"cache {name}: it refuses the user, so the user default is used")
        return client

    def _connect_as(self, user: str | None, host: str, port: int):
        """Return a redis.Redis, which connects when it is used."""
        redis = load_redis()
        secured = {"ssl": True, "ssl_check_hostname": True, "ssl_ca_certs": self.address.ca}
        return redis.Redis(
            host=host, port=port, db=self.address.database, username=user, password=self._password,
            socket_connect_timeout=CONNECT, socket_timeout=READ, socket_keepalive=True,
            protocol=2, redis_connect_func=_limit,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),  # the background thread tries again
            **(secured if self.address.tls else {}),
        )  # fmt: skip

    def _take_slots(self, answers: Iterable[tuple[Server, list | str | None]]) -> str | None:
        """Assign slots to nodes from the first usable answer of _ask_slots().

        Return the error of a server that is not a Cluster. If a Cluster refuses the query, reading a key
        fails with MOVED.
        """
        self._look_at, self._stale = time.monotonic() + 1, False
        server, nodes = next(((server, nodes) for server, nodes in answers if nodes is not None), (None, []))
        self._known = server is not None
        if server is None:
            return None
        if isinstance(nodes, str):
            return nodes
        hosts = [(server.host if name in ("", "?") else name, port) for _, _, name, port in nodes]
        found = {host: self._all.get(host) or self._server(*host) for host in hosts}
        # keep the hosts of the address, to ask them again when all other nodes are down
        self._all = {host: self._all[host] for host in self.address.hosts} | found
        self._ranges = [(*node[:2], found[host]) for node, host in zip(nodes, hosts, strict=True)]
        groups: list[Server | None] = [None] * GROUPS
        for group, tag in enumerate(TAGS):
            with contextlib.suppress(Unavailable):
                groups[group] = self.at(tag)
        self._groups, self.cluster = groups, True
        return None

    def _work(self) -> None:
        while not self._closing:
            self._awake.wait(_TICK)
            self._awake.clear()
            self._tick()
        self._tick()

    def _tick(self) -> None:
        try:
            down = [server for server in self if server.down is not None]
            for server in down:
                server.try_again()
            stale = self._stale or not self._known or (down and len(self) > 1)
            if stale and time.monotonic() > self._look_at:
                self._take_slots((server, _ask_slots(server)) for server in self)
            for function in list(self._functions):
                function()
        except Exception as error:  # an error here must not end the training or the thread
            self.log(f"cache {self.address}: {_text(error)}")


def _limit(connection: Any) -> None:
    """Wrap the socket of a new redis-py connection in _Limited, then log in."""
    connection._sock = _Limited(connection._sock)
    connection.on_connect()


def _ask_slots(server: Server) -> list[tuple[int, int, str, int]] | str | None:
    """Return (first, last, host, port) of each range of slots; the error of a server that is not a Cluster;
    None if it cannot be asked now."""

    def talk(client: Any) -> list | str:
        try:
            answer = client.execute_command("CLUSTER SLOTS")
        except load_redis().ResponseError as error:
            if not _is_about_one_command(error):
                raise
            return _text(error)
        found = [(int(a), int(b), (main[0] or b"").decode(), int(main[1])) for a, b, main, *_ in answer]
        if not found or not all(0 <= a <= b < _SLOTS and 0 < port < 65536 for a, b, _, port in found):
            raise ValueError(f"CLUSTER SLOTS: {answer!r:.60}")
        return found

    try:
        return server.call(talk, again=True)
    except Unavailable:
        return None


def load_redis() -> ModuleType:
    """Return redis-py. Raises BadInput that names the command to install it."""
    return import_optional("redis", "a shared cache needs redis-py", "'redis[hiredis]'")


def _is_about_one_command(error: Exception) -> bool:
    """Return whether other commands may still work."""
    errors = load_redis().exceptions
    return isinstance(error, errors.ResponseError) and not isinstance(error, errors.ClusterDownError)


def _is_about_the_password(error: Exception) -> bool:
    # "Invalid Username" is redis-py's own text for an answer to AUTH that is not from Redis
    return isinstance(error, load_redis().AuthenticationError) and "Invalid Username" not in str(error)


def _text(error: Exception) -> str:
    """Return the error as one line. A password in the server's text is replaced."""
    if _is_about_the_password(error):
        return "it refuses the user or the password"
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ssl.SSLError) or "certificate" in text.lower():
        text = f"its certificate is not trusted: {text}"
    elif isinstance(error, (TypeError, AttributeError, ValueError, LookupError)):
        text = f"this is not an answer of Redis: {text}"
    secret = None
    with contextlib.suppress(BadInput):
        secret = addresses.password()
    return (text.replace(secret, "***") if secret else text)[:300]
