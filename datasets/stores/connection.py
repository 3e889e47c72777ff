"""The connection to a shared cache: redis-py, and the handling of failures.

The server is one of Redis or Valkey, or a node of a Cluster: redis-py's cluster client then finds the others.
A server that fails is not asked any more; a background thread asks it until it answers again. So a job waits
once for a server that stops answering, not once for each batch.

The URL of --cache never contains the password:

    redis://user@cache.example:6379                a server, or one node of a Cluster
    rediss://user@cache.example?ca=/etc/ca.pem     the same, over TLS
    redis://cache.example/3/team                   database 3; keys begin with "team"
    redis://cache.example?form=encoded             the files' bytes instead of small pixels

CA certificates come from ?ca=FILE, BOOTFILE_CACHE_CA or the system. A server's certificate must be for its
host name.
"""

import contextlib
import itertools
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from bootfile.ground.errors import BadInput, import_optional
from bootfile.ground.files import explained
from datasets.stores.forms import SIZED

PASSWORD = "BOOTFILE_CACHE_PASSWORD"
PASSWORD_FILE = "BOOTFILE_CACHE_PASSWORD_FILE"
CA = "BOOTFILE_CACHE_CA"
_PORT = 6379
CONNECT = 1.0  # seconds to connect
READ = 1.0  # seconds without a byte
_SLOWEST = 20e6  # bytes/s: reading the files is faster than that
_REQUEST = 800_000  # bytes requested at a time: larger answers are slower
_TICK = 0.5  # seconds between two rounds of the background thread
_PAUSE = 30.0  # seconds before a server that failed is asked again: a failure costs a job up to 2 seconds
_FULL = 60.0  # seconds before the next try to put into a full server
_URL = (
    r"redis(?P<tls>s)?://((?P<user>[^:@/?#,\s]+)@)?(?P<host>\[[\da-fA-F:.]+\]|[^:@/?#,\s\[\]]+)"
    r"(:(?P<port>\d{1,5}))?(/(?P<database>\d{1,9})(?=[/?]|$))?(/(?P<prefix>[\w.:-]+))?/?(\?(?P<query>.*))?"
)


class Address(NamedTuple):
    """The address of a shared cache. user: None for the server's default user. tls: whether the connections
    use TLS. ca: file of CA certificates, None for the system's. database: its number. prefix: the first part
    of all keys. form: of the samples."""

    host: str
    port: int = _PORT
    user: str | None = None
    tls: bool = False
    ca: str | None = None
    database: int = 0
    prefix: str = "bootfile"
    form: str = "decoded"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host  # an IPv6 address
        return f"{host}:{self.port}"


def parse(text: str) -> Address:
    """Return the Address of a URL. Every rank calls it when it opens its stores, before it connects. Raises
    BadInput; its message never contains the URL, which may have a password."""
    match = re.fullmatch(_URL, text)
    query = urllib.parse.parse_qs(match["query"] or "", keep_blank_values=True) if match else {}
    form = query.pop("form", ["decoded"])
    ca = query.pop("ca", [""])
    port = int(match["port"] or _PORT) if match else 0
    is_valid = not query and len(form) == len(ca) == 1 and form[0] in SIZED and 0 < port < 2**16
    if not match or not is_valid:
        raise BadInput(
            "--cache is not redis://[USER@]HOST[:PORT][/DATABASE][/PREFIX][?ca=FILE&form="
            f"{'|'.join(SIZED)}], or rediss://..., of one host. If it has a password, change that, and set "
            f"{PASSWORD}, or {PASSWORD_FILE} to the path of a file with it: others can read the command"
        )
    certificates = ca[0] or os.environ.get(CA) or None
    if certificates and not os.path.isfile(certificates):
        raise BadInput(f"--cache: the file of certificates {certificates} does not exist")
    user = urllib.parse.unquote(match["user"]) if match["user"] else None
    host = match["host"].strip("[]").lower()
    database, prefix = int(match["database"] or 0), match["prefix"] or "bootfile"
    return Address(host, port, user, bool(match["tls"]), certificates, database, prefix, form[0])


def password() -> str | None:
    """Return the password from the file in BOOTFILE_CACHE_PASSWORD_FILE, or from BOOTFILE_CACHE_PASSWORD;
    None if neither is set. Raises BadInput if the file cannot be read."""
    path = os.environ.get(PASSWORD_FILE)
    if not path:
        return os.environ.get(PASSWORD) or None
    failure = f"{PASSWORD_FILE}: cannot read {path}"
    with explained(failure, UnicodeDecodeError), open(os.path.expanduser(path), encoding="utf-8") as file:
        return file.read().rstrip("\r\n") or None


class Unavailable(Exception):
    """The server cannot be asked now or refuses a command. The message contains the reason."""


class Server:
    """The server of an Address. Threads may share it; after a fork or pickling it opens new connections.

    log: called with one line of text, only in the process that created this object. None: a pickled copy.
    `down`: the reason why the server is not asked, or None.
    `full_until`: time.monotonic() of the next try to put into a full server; 0 if it was never full.
    Raises BadInput if the user or the password is wrong. Any other error is logged, and the server is tried
    again in the background.
    """

    _thread: threading.Thread | None

    def __init__(self, address: Address, log: Callable[[str], None] | None = print):
        load_redis()  # here, because the import takes as long as a server's time-out
        self.address = address
        self._log = log
        self._owner = os.getpid()  # the process that may log
        self._password = password()
        self.down: str | None = None
        self._retry_at = 0.0  # time.monotonic() when a server that is down is asked again
        self.full_until = 0.0
        self._renew()
        try:
            # now, in the process of the job: a wrong password must end it. A pickled copy connects at its
            # first read
            if log:
                self._probe()
        except Exception as error:
            if _is_about_the_password(error):
                raise BadInput(
                    f"cache {address}: {_text(error)}; give the user in --cache redis://USER@..., and the "
                    f"password in {PASSWORD} or {PASSWORD_FILE}"
                ) from None
            self._fail(error)

    def mget(self, keys: list[bytes], sizes: np.ndarray) -> list[bytes | None]:
        """Return the values of keys, None for each missing one. Raises Unavailable. sizes: of the values in
        bytes, int64 [n], to limit the time."""
        # positions at which the next request begins
        cuts = [0, *np.flatnonzero(np.diff(np.cumsum(sizes) // _REQUEST)) + 1, len(keys)]

        def read(client: Any) -> list[bytes | None]:
            # the time-out is for the next byte only: a server that sends a few at a time would not reach it
            end = time.monotonic() + CONNECT + READ + sizes.sum() / _SLOWEST
            values: list[bytes | None] = []
            for first, last in itertools.pairwise(cuts):
                values += _get_values(client, keys[first:last])
                if time.monotonic() > end:
                    raise TimeoutError(f"the answer came more slowly than {_SLOWEST / 1e6:.0f} MB/s")
            return values

        return self._call(read, any_error=True) if keys else []

    def execute(self, *commands: tuple, errors: bool = False) -> list:
        """Return redis-py's answers to some hundred commands at most, which are sent together. errors: return
        a redis.ResponseError in the place of an answer, instead of raising Unavailable. Raises Unavailable.
        """

        def talk(client: Any) -> list:
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return pipeline.execute(raise_on_error=not errors)

        return self._call(talk)

    def time(self) -> float:
        """Return the server's time in seconds. The clocks of the nodes may differ. Raises Unavailable."""
        seconds, microseconds = self._call(lambda client: client.time())
        return seconds + microseconds / 1e6

    def memory(self) -> dict:
        """Return `used_memory` and `maxmemory` (bytes), `maxmemory_policy` and more; {} if the server does
        not tell. Of a Cluster they are those of one node."""
        try:
            return self._call(lambda client: client.info("memory"))
        except Unavailable:
            return {}

    def is_full(self) -> bool:
        """Return whether the server was full a short time ago."""
        return time.monotonic() < self.full_until

    def pause_puts(self, reason: object) -> None:
        """Let is_full() return True for a while. Samples are still read."""
        if not self.full_until:
            self.log(f"cache {self.address} stores no more samples: {reason}; others come from the next tier")
        self.full_until = time.monotonic() + _FULL

    def log(self, text: str) -> None:
        """Log a line, from any thread of the process that created this object."""
        if self._log and os.getpid() == self._owner:  # otherwise each of the DataLoader's workers would log
            self._log(text)

    def each_tick(self, function: Callable[[], None]) -> None:
        """Call function() in the background twice a second, until close(). Call this first in a forked
        process: each process has its own background thread and connections."""
        if os.getpid() != self._pid:
            self._renew()
        self._functions.append(function)
        self.wake()

    def wake(self) -> None:
        """Start the next round of the background thread now. The first call in a process starts it."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="cache", daemon=True)
                self._thread.start()
        self._awake.set()

    def close(self) -> None:
        """Stop the background thread and close the connections."""
        self._closing = True
        if self._thread and self._thread is not threading.current_thread():  # that may collect garbage
            self._awake.set()
            self._thread.join(10)
        self._disconnect()

    def __reduce__(self) -> tuple:
        return Server, (self.address, None)

    def _renew(self) -> None:
        """Forget the thread, the lock and the connections: a forked process may not use those of its
        parent. It is called in the process that creates this object, and first in each forked one."""
        self._pid = os.getpid()
        self._closing = False  # whether the background thread is to end
        self._lock = threading.RLock()  # held while a client is made or a failure is marked
        self._client: Any = None
        self._thread = None
        self._functions: list[Callable[[], None]] = []  # of each_tick()
        self._awake = threading.Event()

    def _call(self, talk: Callable[[Any], Any], any_error: bool = False) -> Any:
        """Return talk(client). any_error: a refused command is also a failure of the server. Raises
        Unavailable, after a failure at once, so the job does not wait for each command."""
        if self.down is not None:
            raise Unavailable(self.down)
        try:
            return talk(self._connected())
        except Exception as error:  # an answer that is not in Redis' protocol may raise any exception
            errors = load_redis().exceptions
            # a server that refuses one command may still answer others
            is_refusal = isinstance(error, errors.ResponseError)
            if any_error or not is_refusal or isinstance(error, errors.ClusterDownError):
                self._fail(error)
            raise Unavailable(_text(error)) from None

    def _connected(self) -> Any:
        """Return a redis.Redis, or a redis.RedisCluster if the server is a node of a Cluster. The first
        command of a process, and the first after a failure, connects."""
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _connect(self) -> Any:
        """Return a new client."""
        redis = load_redis()
        address = self.address
        options = {"host": address.host, "port": address.port, "username": address.user, "protocol": 2}
        options |= {"password": self._password, "socket_connect_timeout": CONNECT, "socket_timeout": READ}
        # the background thread tries again
        options |= {"socket_keepalive": True, "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0)}
        if address.tls:
            options |= {"ssl": True, "ssl_check_hostname": True, "ssl_ca_certs": address.ca}
        client = redis.Redis(db=address.database, **options)
        # a node of a Cluster has only a part of the keys, and names the others
        with contextlib.suppress(redis.ResponseError):  # the user has no right to ask
            if client.info("cluster").get("cluster_enabled") == 1:
                client.close()
                return redis.RedisCluster(require_full_coverage=False, **options)
        return client

    def _disconnect(self) -> None:
        """Close the connections, at the end and after each failure."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _probe(self) -> None:
        """Raise an exception unless the server answers. The user may read keys of the prefix only."""
        _get_values(self._connected(), [f"{self.address.prefix}:0".encode()])

    def _fail(self, error: Exception) -> None:
        """Mark the server as down. Only the first of several threads logs a line."""
        with self._lock:
            self._retry_at = time.monotonic() + _PAUSE
            if self.down is None:
                self.down = _text(error)
                text = "samples come from the next tier until it answers again"
                self.log(f"cache {self.address}: {self.down.rstrip('.')}; {text}")
        self._disconnect()  # other connections may be broken too, or receive a late answer

    def _try_again(self) -> None:
        """Ask a server that is down, if its pause is over."""
        if self.down is None or time.monotonic() < self._retry_at:
            return
        try:
            self._probe()
        except Exception as error:
            self._fail(error)
            return
        self.down = None
        self.log(f"cache {self.address}: it answers again")

    def _work(self) -> None:
        """Run the rounds of the background thread, until close()."""
        while not self._closing:
            self._awake.wait(_TICK)
            self._awake.clear()
            try:
                self._try_again()
                for function in list(self._functions):
                    function()
            except Exception as error:  # an error here must not end the training or the thread
                self.log(f"cache {self.address}: {_text(error)}")


def _get_values(client: Any, keys: list[bytes]) -> list[bytes | None]:
    """Return the answer to MGET. Raises ConnectionError if it is not a list of values: the port of another
    program may answer anything, and a sample must not come from it."""
    values = getattr(client, "mget_nonatomic", client.mget)(keys)  # a Cluster has the keys in many slots
    is_valid = isinstance(values, list) and len(values) == len(keys)
    if not is_valid or not all(value is None or isinstance(value, bytes) for value in values):
        raise ConnectionError(f"this is not an answer of Redis: {len(keys)} values were requested")
    return values


def load_redis() -> ModuleType:
    """Return redis-py. Raises BadInput that names the command to install it."""
    return import_optional("redis", "a shared cache needs redis-py", "'redis[hiredis]'")


def _is_about_the_password(error: Exception) -> bool:
    """Return whether the server refused the user or the password."""
    # "Invalid Username" is redis-py's own text for an answer to AUTH that is not from Redis
    return isinstance(error, load_redis().AuthenticationError) and "Invalid Username" not in str(error)


def _text(error: Exception) -> str:
    """Return the error as one line. A password in the server's text is replaced."""
    if _is_about_the_password(error):
        return "it refuses the user or the password"
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, (TypeError, AttributeError, ValueError, LookupError)):
        text = f"this is not an answer of Redis: {text}"
    with contextlib.suppress(BadInput):  # the file of the password is missing now
        text = text.replace(password() or "\0", "***")
    return text[:300]
