"""Redis servers on free ports of 127.0.0.1: one, with users, with TLS, or a Cluster; and their stores."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import trustme

from datasets.stores import connection, forms, redis_store
from datasets.stores.files import FileStore
from datasets.stores.redis_store import RedisStore
from datasets.stores.tiers import Tiers
from tests.conftest import LONGEST, free_port, is_stopped, wait_for_port, wait_until

PROGRAM = shutil.which("redis-server")
needed = pytest.mark.skipif(
    PROGRAM is None, reason="redis-server is not installed: make packages installs it"
)
PASSWORD = "correct-horse-battery"
# the rights of a cache user in the README: no EVAL, no KEYS, no keys of other users
RIGHTS = (
    "~bootfile:* resetchannels -@all +time +info +mget +set +strlen +persist +expire +unlink +hset "
    "+hgetall +sadd +srem +smembers +zadd +zrem +zremrangebyscore +zrange +zcard "
    "+select"
)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A job gives a server a second. One on a busy machine may need more, and is not down."""
    monkeypatch.setattr(connection, "CONNECT", LONGEST)
    monkeypatch.setattr(connection, "READ", LONGEST)


class RedisServer:
    """A server that runs until the end of the `with` block. options: lines of its configuration."""

    def __init__(self, folder, *options: str, tls: trustme.CA | None = None):
        self.port, self.process, self.tls = free_port(), None, tls
        self.folder = Path(folder) / f"redis-{self.port}"
        self.folder.mkdir()
        lines = ["bind 127.0.0.1", f"dir {self.folder}", 'save ""', "appendonly no", "loglevel warning"]
        lines += options
        lines.append(f"tls-port {self.port}\nport 0" if tls else f"port {self.port}")
        if tls:
            certificate = tls.issue_cert("127.0.0.1").private_key_and_cert_chain_pem
            certificate.write_to_path(str(self.folder / "server.pem"))
            tls.cert_pem.write_to_path(str(self.folder / "ca.pem"))
            lines += [f"tls-cert-file {self.folder}/server.pem", f"tls-key-file {self.folder}/server.pem"]
            lines += [f"tls-ca-cert-file {self.folder}/ca.pem", "tls-auth-clients no"]
        (self.folder / "redis.conf").write_text("\n".join(lines) + "\n")

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    def start(self) -> None:
        assert self.process is None or self.process.poll() is not None, "it runs already"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([PROGRAM, str(self.folder / "redis.conf")], **quiet)
        wait_for_port(self.port, self.process)

    def kill(self) -> None:
        """Kill the server. Its data are lost, because it has no file."""
        if self.process and self.process.poll() is None:
            self.process.kill()
        if self.process:
            self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(self.process.pid))

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def client(self, **options):
        """Return a client of redis-py, to read and to damage values."""
        import redis

        if self.tls:
            options |= {"ssl": True, "ssl_ca_certs": str(self.folder / "ca.pem")}
        return redis.Redis(port=self.port, protocol=2, **options)

    def url(self, user: str = "", tail: str = "") -> str:
        return f"redis{'s' * bool(self.tls)}://{user and user + '@'}127.0.0.1:{self.port}{tail}"


def with_user(folder, rights: str = RIGHTS, **options) -> RedisServer:
    """Return a server that admits only the user "bootfile" with PASSWORD."""
    return RedisServer(folder, "user default off", f"user bootfile on >{PASSWORD} {rights}", **options)


@contextlib.contextmanager
def cluster(folder, *options: str):
    """Yield three nodes, each with a third of the slots."""
    with contextlib.ExitStack() as stack:
        common = ("cluster-enabled yes", "cluster-node-timeout 60000", "cluster-require-full-coverage no")
        nodes = []
        for _ in range(3):
            bus = free_port()
            nodes.append(stack.enter_context(RedisServer(folder, *common, f"cluster-port {bus}", *options)))
            nodes[-1].bus = bus
        for number, node in enumerate(nodes):
            first, last = number * 16384 // 3, (number + 1) * 16384 // 3 - 1
            node.client().execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            nodes[0].client().execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, node.bus)
        wait_until(lambda: all(whole(node) for node in nodes))
        yield nodes


def whole(node) -> bool:
    """Return whether the node sees a complete Cluster of three."""
    words = node.client().execute_command("CLUSTER", "INFO").split()
    return {b"cluster_state:ok", b"cluster_known_nodes:3", b"cluster_size:3"} <= {*words}


class Opened:
    """A RedisStore of a URL. said: the lines that it logged. tiers: the store in front of the files."""

    def __init__(self, url, index, mode="", form=None):
        self.said = []
        self.server = connection.Server(connection.parse(url), self.said.append)
        self.store = RedisStore(self.server, index, mode, form)
        self.tiers = Tiers(self.store, FileStore(index))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.tiers.close()
        self.server.close()

    def key(self, id) -> bytes:
        return redis_store.sample_key(self.server, self.store.name, id)

    def put_all(self) -> None:
        """Put all samples, made from the files."""
        ids = range(len(self.store.index))
        samples = [forms.make(self.tiers.files, id, self.store.form) for id in ids]
        assert self.store.put(ids, samples) == len(ids)

    def sets(self) -> list[redis_store.StoredSet]:
        """Return the data sets on the server."""
        return redis_store.list_sets(self.server)

    def stored(self) -> redis_store.StoredSet:
        """Return the data set of this store."""
        return next(each for each in self.sets() if each.name == self.store.name)


def until(condition, seconds: float = LONGEST) -> None:
    """Wait until the condition is true."""
    wait_until(condition, timeout=seconds)


def files_with(text: str, folder) -> list[str]:
    """Return the files below a folder that contain a text."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return [os.fspath(path) for path in files if text.encode() in path.read_bytes()]
