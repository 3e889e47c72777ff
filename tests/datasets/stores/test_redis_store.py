"""The shared cache returns the stored samples or none. The servers are real."""

import contextlib
import copy
import os
import pickle
import re
import socket
import threading
import time

import numpy as np
import pytest
import trustme

from bootfile.ground.errors import BadInput
from datasets.folders import image_folder
from datasets.stores import connection, forms, redis_store
from datasets.stores.files import FileStore
from tests.conftest import LONGEST, ROOT, finish, start, wait_until
from tests.support import pictures
from tests.support.redis_server import (
    PASSWORD,
    RIGHTS,
    Opened,
    RedisServer,
    cluster,
    needed,
    until,
    with_user,
)

pytest.importorskip("redis", reason="redis-py is not installed")


@pytest.fixture(scope="module")
def made(index):
    """Return form -> samples of the files, by id."""
    files = FileStore(index)
    return {form: [forms.make(files, id, form) for id in range(len(index))] for form in forms.SIZED}


def same(found, expected) -> bool:
    """Return whether the values that were read are those samples."""
    return len(found) == len(expected) and all(
        (isinstance(one, bytes) or (one is not None and one.shape == (*other[:2], 3)))
        and bytes(one) == bytes(other.content)
        for one, other in zip(found, expected, strict=True)
    )


ALL = list(range(40))


# addresses


def test_addresses(tmp_path):
    certificates = tmp_path / "ca.pem"
    certificates.write_text("x")
    for text, rest in (
        ("redis://cache.example", {}),
        ("redis://user@cache.example:7000/3/team",
         {"port": 7000, "user": "user", "database": 3, "prefix": "team"}),
        ("rediss://u%40x@cache.example?form=encoded&ca=" + str(certificates),
         {"user": "u@x", "tls": True, "ca": str(certificates), "form": "encoded"}),
        ("redis://[::1]:7000", {"host": "::1", "port": 7000}),
    ):  # fmt: skip
        assert connection.parse(text) == connection.Address(**{"host": "cache.example"} | rest)


def test_certificates_and_the_password_of_the_environment(tmp_path, monkeypatch):
    for name in ("ca.pem", "other.pem"):
        (tmp_path / name).write_text("x")
    monkeypatch.setenv(connection.CA, str(tmp_path / "ca.pem"))
    assert connection.parse("rediss://a").ca == str(tmp_path / "ca.pem")
    assert connection.parse(f"rediss://a?ca={tmp_path / 'other.pem'}").ca == str(tmp_path / "other.pem")
    for name in (connection.PASSWORD, connection.PASSWORD_FILE):
        monkeypatch.delenv(name, raising=False)
    assert connection.password() is None
    monkeypatch.setenv(connection.PASSWORD, "of the variable")
    assert connection.password() == "of the variable"
    monkeypatch.setenv(connection.PASSWORD_FILE, str(tmp_path / "secret"))
    for content, expected in (("word \r\n", "word "), ("word", "word"), ("\n", None)):
        (tmp_path / "secret").write_text(content)
        assert connection.password() == expected


def test_a_client_has_what_the_address_names(monkeypatch):
    monkeypatch.setenv(connection.PASSWORD, "secret")
    made = []

    class Client:
        def __init__(self, **options):
            made.append(options)

        def info(self, section):
            return {"cluster_enabled": 0}

    redis = connection.load_redis()
    monkeypatch.setattr(redis, "Redis", Client)
    connection.Server(connection.parse("rediss://user@a:7000/3"), None)._connect()
    [options] = made
    wanted = {"db": 3, "host": "a", "port": 7000, "username": "user", "password": "secret", "ssl": True}
    assert wanted.items() <= options.items() and options["ssl_check_hostname"]
    assert options["socket_timeout"] == connection.READ and options["protocol"] == 2


@pytest.mark.parametrize("text", [
    "http://a", "redis://", "a:6379", "redis://a:1,b:2", "redis://a:port", "redis://a:99999",
    "redis://u@a:1,redis://v@b:2", "redis://a?forms=encoded", "redis://a?form=jpeg",
    "redis://a?form=encoded&form=decoded", "redis://a?ca=/not/there", "redis://a/0/x/y", "redis://a/a{b}",
    "redis://user:PASS@a:1", "redis://:PASS@a", "rediss://user:PA@SS@a:1,b:2", "redis://user:PA,SS@a",
    "redis:/user:PASS@a", "redis://user:P/A,SS@a:x", "redis://a?PASS", "redis://a?form=PASS",
    "redis://a#PASS", "redis://a PASS", "redis://a/PASS/x/y", "redis://a/{PASS}", "redis://a:PASS", "PASS", "redis://PASS@a?x=y",
])  # fmt: skip
def test_addresses_that_are_refused_are_not_repeated_because_they_may_have_a_password(text):
    with pytest.raises(BadInput, match="--cache") as caught:
        connection.parse(text)
    assert not {"PASS", "PA", "SS", "P"} & set(re.split(r"[^A-Z_]+", str(caught.value)))


# values


@needed
@pytest.mark.parametrize("form", forms.SIZED)
def test_what_was_put_comes_back(form, empty_redis, index, made):
    with Opened(empty_redis.url(tail=f"?form={form}"), index) as opened:
        store, samples = opened.store, made[form]
        assert store.read(ALL) == [None] * 40
        assert store.put(ALL[:30], samples[:30]) == 30
        ids = [39, 3, 0, 3, 29, 35, 17]
        found = store.read(ids)
        assert found[0] is None and found[5] is None
        kept = [place for place in range(7) if place not in (0, 5)]
        assert same([found[place] for place in kept], [samples[ids[place]] for place in kept])
        assert store.lengths(ALL).tolist() == [len(sample.content) + 24 for sample in samples[:30]] + [0] * 10
        assert store.read([]) == []
        assert isinstance(found[6], bytes) == (form == "encoded")


@needed
def test_a_folder_whose_name_is_not_text_has_a_cache(empty_redis, index, made):
    index = copy.copy(index)
    index.root = os.fsdecode(b"/data/caf\xe9")
    with Opened(empty_redis.url(), index) as opened:
        opened.store.reference.register()
        assert opened.store.put(ALL[:1], made["decoded"][:1]) == 1 and opened.said == []
        assert "caf" in redis_store.list_sets(opened.store.server)[0].title


def damages(value: bytes, other: bytes):
    yield "flipped bit in the pixels", value[:-9] + bytes([value[-9] ^ 16]) + value[-8:]
    yield "flipped bit in the height", value[:4] + bytes([value[4] ^ 1]) + value[5:]
    yield "flipped bit in the checksum", value[:20] + bytes([value[20] ^ 1]) + value[21:]
    yield "cut", value[: len(value) // 2]
    yield "cut in the header", value[:7]
    yield "empty", b""
    yield "one byte more", value + b"\0"
    yield "much longer", value + bytes(1_000_000)
    yield "that of another sample", other
    yield "another version", value[:3] + b"\2" + value[4:]
    yield "a pickle", pickle.dumps(os.getcwd)


@needed
@pytest.mark.parametrize("form", forms.SIZED)
def test_a_damaged_value_is_a_miss(form, empty_redis, index, made):
    client, samples = empty_redis.client(), made[form]
    with Opened(empty_redis.url(tail=f"?form={form}"), index) as opened:
        store = opened.store
        store.put(ALL, samples)
        victim, twin = 2, 9  # of equal size
        assert len(samples[victim].content) == len(samples[twin].content) or form == "encoded"
        keys = [opened.key(id) for id in (victim, twin)]
        good, other = client.mget(keys)
        for name, bad in damages(good, other):
            client.set(keys[0], bad)
            found = store.read(ALL)
            assert found[victim] is None, name
            assert same(found[:victim] + found[victim + 1 :], samples[:victim] + samples[victim + 1 :]), name
        client.delete(keys[0])
        client.lpush(keys[0], "a list")
        assert store.read([victim]) == [None]
        assert opened.said == []


@needed
def test_threads_forks_and_pickles(empty_redis, index, made):
    """Each has its own connections, and a pickle has neither a socket nor the password."""
    with Opened(empty_redis.url(), index) as opened:
        store = opened.store
        store.put(ALL, made["decoded"])
        wrong = []

        def read():
            for _ in range(10):
                ids = np.random.default_rng().permutation(40)
                if not same(store.read(ids), [made["decoded"][id] for id in ids]):
                    wrong.append(ids)

        children = []
        for _ in range(3):  # with open connections
            child = os.fork()
            if not child:
                try:
                    read()
                    os._exit(len(wrong))
                finally:
                    os._exit(1)
            children.append(child)
        read()
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0] and not wrong
        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        copy = pickle.loads(pickle.dumps(store))
        assert same(copy.read(ALL), made["decoded"])
        copy.server.close()


@needed
def test_a_forked_process_finds_a_server_that_comes_back(tmp_path, index, made):
    """It has its own thread, because that of its parent does not exist there."""
    server = RedisServer(tmp_path)
    with Opened(server.url(), index) as opened, server:
        opened.store.put(ALL, made["decoded"])
        server.kill()
        assert opened.store.read(ALL) == [None] * 40
        child = os.fork()
        if not child:
            code = 1
            try:
                until(lambda: same(opened.store.read(ALL), made["decoded"]))
                code = 0
            finally:
                os._exit(code)
        server.start()
        until(lambda: opened.store.put(ALL, made["decoded"]) == 40)
        assert os.waitpid(child, 0)[1] == 0


# a Cluster


@pytest.mark.thorough
@needed
def test_a_cluster_is_read_until_a_node_dies_and_after_it_comes_back(tmp_path, index, made, monkeypatch):
    """The address of one node is enough. Without the node, all samples come from the next tier."""
    monkeypatch.setenv(connection.PASSWORD, PASSWORD)
    samples, user = made["encoded"], f"user bootfile on >{PASSWORD} {RIGHTS} +command +cluster|slots"
    with cluster(tmp_path, user) as nodes:
        with Opened(nodes[1].url("bootfile", "?form=encoded"), index, "active") as opened:
            store = opened.store
            assert store.put(ALL, samples) == 40 and same(store.read(ALL), samples)
            assert min(node.client().dbsize() for node in nodes) >= 5, "each node has samples"
            until(lambda: opened.sets() and opened.stored().references)
            assert opened.stored().samples == 40 and opened.stored().mode == "active"
            nodes[2].kill()
            for _ in range(5):
                assert store.read(ALL) == [None] * 40
            assert len(opened.said) == 1
            nodes[2].start()
            until(lambda: len(opened.said) == 2 and any(sample is not None for sample in store.read(ALL)))
            until(lambda: store.put(ALL, samples) == 40)
            assert same(store.read(ALL), samples)
        assert sum(node.client().dbsize() for node in nodes) == 0, "the mode was active"


# faults


@needed
def test_a_server_that_comes_later_falls_silent_and_is_replaced(tmp_path, index, made, monkeypatch):
    server, samples = RedisServer(tmp_path), made["decoded"]
    with Opened(server.url(), index) as opened:
        store = opened.store
        for _ in range(100):
            assert store.read(ALL) == [None] * 40 and store.put(ALL, samples) == 0
        assert len(opened.said) == 1 and "Connection refused" in opened.said[0]
        with server:
            until(lambda: store.put(ALL, samples) == 40)
            assert same(store.read(ALL), samples)
            monkeypatch.setattr(connection, "READ", 0.2)
            store.server._disconnect()  # the next connection has this limit
            server.pause()
            for _ in range(50):
                assert store.read(ALL) == [None] * 40
            monkeypatch.setattr(connection, "READ", LONGEST)
            server.resume()
            until(lambda: same(store.read(ALL), samples))
            again = f"cache 127.0.0.1:{server.port}: it answers again"
            assert "Timeout" in opened.said[2] and opened.said[1:] == [again, opened.said[2], again]
            server.kill()
            server.start()  # a new process without the data: connections are cut, but no server is down
            assert store.read(ALL) == [None] * 40
            assert len(opened.said) == 4


@needed
def test_an_answer_that_trickles_is_given_up(tmp_path, index, made, monkeypatch):
    """Every byte arrives in time, but the whole answer would take long."""
    monkeypatch.setattr(connection, "_REQUEST", 1)  # the time is looked at after each sample
    with RedisServer(tmp_path) as server, Opened(server.url(), index) as opened:
        opened.store.put(ALL, made["decoded"])
        get_values, read = connection._get_values, []

        def trickle(client, keys):
            if len(keys[0]) > 20:  # not the probe
                read.append(time.sleep(0.15))
            return get_values(client, keys)

        monkeypatch.setattr(connection, "_get_values", trickle)
        monkeypatch.setattr(connection, "CONNECT", 1.0)
        monkeypatch.setattr(connection, "READ", 0.2)
        assert opened.store.read(ALL) == [None] * 40
        assert len(read) < 40 and "more slowly than 20 MB/s" in opened.said[0]


class Odd:
    """A server with one answer to every command, except for those in `others`. connections: their number."""

    def __init__(self, answer: bytes, **others: bytes):
        self.answer, self.others, self.connections = answer, others, 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._server.getsockname()[1]}"

    def __enter__(self):
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection = self._server.accept()[0]
                self.connections += 1
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection):
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as commands:
            while head := commands.readline():
                words = [commands.read(int(commands.readline()[1:]) + 2)[:-2] for _ in range(int(head[1:]))]
                connection.sendall(self.others.get(words[0].decode(), self.answer))


CLUSTER = b"$17\r\ncluster_enabled:1\r\n"


@pytest.mark.thorough
@pytest.mark.parametrize("answer, others", [
    *((answer, {}) for answer in (
        b"+OK\r\n", b"$2\r\nhi\r\n", b"*1\r\n" * 3000, b"%1\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n",
    )),
    (b"+OK\r\n", {"INFO": CLUSTER, "CLUSTER": b"*1\r\n*3\r\n:0\r\n:16383\r\n$-1\r\n"}),
    (b"*1\r\n:5\r\n", {"INFO": b"-ERR unknown command\r\n"}),
    (b"+OK\r\n", {"INFO": b"*0\r\n"}),
], ids=lambda value: repr(value)[:50])  # fmt: skip
def test_a_server_that_is_not_redis_is_a_miss(answer, others, index, made, monkeypatch):
    """It is one line after any number of retries, without a traceback, with and without a password."""
    monkeypatch.setenv(connection.PASSWORD, PASSWORD)
    monkeypatch.setattr(connection, "READ", 0.2)  # half an answer has no end
    with Odd(answer, **others) as odd:
        for url in (odd.url, odd.url.replace("//", "//user@")):
            with Opened(url, index, "active") as opened:
                assert opened.store.read(ALL) == [None] * 40
                opened.store.put(ALL, made["decoded"])
                before = odd.connections
                until(lambda before=before: odd.connections >= before + 2)
            assert len(opened.said) == 1 and "127.0.0.1" in opened.said[0], opened.said


@needed
def test_wrong_credentials_are_an_error_at_once(tmp_path, index, monkeypatch):
    with with_user(tmp_path) as server:
        for user, password in (("bootfile", "wrong"), ("unknown", PASSWORD), ("", PASSWORD), ("", "")):
            monkeypatch.setenv(connection.PASSWORD, password)
            with pytest.raises(BadInput, match=f":{server.port}: .*refuses the user") as caught:
                Opened(server.url(user), index)
            assert PASSWORD not in str(caught.value) and "wrong" not in str(caught.value)
        secret = tmp_path / "secret"
        secret.write_text(PASSWORD + "\n")
        monkeypatch.setenv(connection.PASSWORD_FILE, str(secret))
        with Opened(server.url("bootfile"), index) as opened:
            assert opened.said == []
            text = connection._text(RuntimeError(f"ERR unknown command 'AUTH' '{PASSWORD}'"))
            assert PASSWORD not in text + repr(vars(opened.store)) + str(pickle.dumps(opened.store))
    monkeypatch.setenv(connection.PASSWORD_FILE, str(tmp_path / "nothing"))
    with pytest.raises(BadInput, match="BOOTFILE_CACHE_PASSWORD_FILE: cannot read"):
        Opened("redis://bootfile@127.0.0.1", index)


@needed
def test_a_user_with_the_rights_that_are_documented(tmp_path, index, made, monkeypatch):
    """The user may do everything that a job, a preload and `ls` need, but no EVAL, and with no other keys."""
    monkeypatch.setenv(connection.PASSWORD, PASSWORD)
    with with_user(tmp_path) as server:
        log = server.client(username="bootfile", password=PASSWORD)
        with Opened(server.url("bootfile"), index, "active") as opened:
            store = opened.store
            assert store.put(ALL, made["decoded"]) == 40 and same(store.read(ALL), made["decoded"])
            redis_store.send_redis_command(store.server, store.name, "PERSIST", np.array(ALL))
            store.reference.register(offline=True)
            until(lambda: opened.sets()[0].references)
            redis_store.sweep(opened.server)
            redis_store.remove(opened.server, store.name)
            assert store.lengths(ALL).tolist() == [0] * 40 and opened.said == []
        for command in (("EVAL", "return 1", 0), ("KEYS", "*"), ("GET", "other")):
            with pytest.raises(Exception, match="permissions"):
                log.execute_command(*command)
    assert "eval" not in RIGHTS


@needed
@pytest.mark.parametrize("without", ["+mget", "+set", "+info", "+zadd +time"])
def test_without_a_right_it_goes_on_without(without, tmp_path, index, made, monkeypatch):
    monkeypatch.setenv(connection.PASSWORD, PASSWORD)
    rights = RIGHTS
    for right in without.split():
        rights = rights.replace(f" {right} ", " ")
    with with_user(tmp_path, rights) as server, Opened(server.url("bootfile"), index, "active") as opened:
        for _ in range(3):
            taken, found = opened.store.put(ALL, made["decoded"]), opened.store.read(ALL)
        assert taken == (0 if without == "+set" else 40 if without != "+mget" else taken)
        works = without not in ("+set", "+mget")
        assert same(found, made["decoded"]) if works else found == [None] * 40
        assert len(opened.said) == (0 if works else 1), opened.said
        assert all("permission" in line for line in opened.said)


@needed
def test_tls(tmp_path, index, made, monkeypatch):
    monkeypatch.setenv(connection.PASSWORD, PASSWORD)
    with with_user(tmp_path, tls=trustme.CA()) as server:
        trusted = f"?form=encoded&ca={server.folder / 'ca.pem'}"
        with Opened(server.url("bootfile", trusted), index) as opened:
            assert opened.store.put(ALL, made["encoded"]) == 40
            assert same(opened.store.read(ALL), made["encoded"]) and opened.said == []
        monkeypatch.setenv(connection.CA, str(server.folder / "ca.pem"))
        with Opened(server.url("bootfile", "?form=encoded"), index) as opened:
            assert same(opened.store.read(ALL), made["encoded"])
        elsewhere = server.url("bootfile", "?form=encoded").replace("127.0.0.1", "localhost")
        with Opened(elsewhere, index) as opened:
            assert opened.store.read(ALL) == [None] * 40
            assert len(opened.said) == 1 and "certificate verify failed" in opened.said[0], "another name"
        monkeypatch.delenv(connection.CA)
        with Opened(server.url("bootfile"), index) as opened:
            for _ in range(3):
                assert opened.store.read(ALL) == [None] * 40
            assert len(opened.said) == 1 and "certificate verify failed" in opened.said[0]
        with Opened(server.url("bootfile").replace("rediss", "redis"), index) as opened:
            assert opened.store.read(ALL) == [None] * 40 and len(opened.said) == 1


# references


@needed
def test_an_active_set_goes_with_the_last_one(empty_redis, index, made):
    client = empty_redis.client()
    with Opened(empty_redis.url(), index, "active") as first:
        first.store.put(ALL, made["decoded"])
        assert 0 < client.ttl(first.key(0)) <= redis_store.SAMPLE_LIFETIME
        with Opened(empty_redis.url(), index, "active") as second:
            until(lambda: len(first.sets()[0].references) == 2)
            assert same(second.store.read(ALL), made["decoded"])
        assert same(first.store.read(ALL), made["decoded"]), "one job is left"
        (stored,) = first.sets()
        assert stored.samples == 40 and stored.mode == "active" and stored.title.endswith("/train")
        keys = {f"bootfile:{stored.name}:about", f"bootfile:{stored.name}:leases", "bootfile:names"}
        assert {key.encode() for key in keys} <= {*client.keys()}, "other versions use these names"
        assert client.ttl(f"bootfile:{stored.name}:about") > redis_store.SAMPLE_LIFETIME, "found by it"
    assert client.dbsize() == 0


@needed
def test_no_heartbeat_follows_the_release(empty_redis, index, monkeypatch):
    """A heartbeat that is on its way ends before the release; the one of Servers.close() is not sent."""
    monkeypatch.setattr("datasets.stores.redis_store._BEAT", 0.0)
    arrived, may_go = threading.Event(), threading.Event()
    beat = redis_store.Reference.beat

    def beat_when_told(reference):
        if threading.current_thread().name == "cache":
            arrived.set()
            assert may_go.wait(LONGEST)
        return beat(reference)

    monkeypatch.setattr(redis_store.Reference, "beat", beat_when_told)
    opened = Opened(empty_redis.url(), index, "active")
    assert arrived.wait(60)
    closing, lock, has_begun = threading.Thread(target=opened.store.close), opened.store._ticks, []

    @contextlib.contextmanager
    def noted():
        has_begun.append(True)
        with lock:
            yield

    opened.store._ticks = noted()
    closing.start()
    wait_until(lambda: has_begun or not closing.is_alive())  # without the lock it releases now
    opened.store._ticks = lock
    may_go.set()
    closing.join()
    opened.server.close()
    assert empty_redis.client().dbsize() == 0


@needed
def test_an_offline_set_stays_and_is_shared(empty_redis, index, made):
    client = empty_redis.client()
    with Opened(empty_redis.url(), index) as preload:
        preload.store.reference.register(offline=True)
        preload.store.put(ALL, made["decoded"])
    assert client.ttl(preload.key(0)) == -1
    for mode in ("offline", "active"):
        with Opened(empty_redis.url(), index, mode) as one, Opened(empty_redis.url(), index, mode) as other:
            until(lambda one=one: len(one.sets()[0].references) == 2)
            assert same(one.store.read(ALL), made["decoded"]) and same(other.store.read(ALL), made["decoded"])
        assert client.dbsize() >= 40
    with Opened(empty_redis.url(), index) as tool:
        (stored,) = tool.sets()
        assert stored.mode == "offline" and stored.references == []
        redis_store.sweep(tool.server)
        assert client.dbsize() >= 40
        redis_store.remove(tool.server, stored.name)
    assert client.dbsize() == 0


SCRIPT = """
import sys, time
sys.path.insert(0, {root!r})
from datasets.folders import image_folder
from datasets.stores import forms
from datasets.stores.files import FileStore
from datasets.stores import connection, redis_store
from datasets.stores.redis_store import RedisStore
redis_store.LIFETIME = 1
connection.CONNECT = connection.READ = 400
index = image_folder.open_index({folder!r})
store = RedisStore(connection.Server(connection.parse({url!r})), index, "active")
store.put([0, 1], [forms.make(FileStore(index), id, "decoded") for id in (0, 1)])
while not store.reference.is_counted:
    time.sleep(0.01)
print("ready", flush=True)
time.sleep(1000)
"""


@needed
def test_the_data_of_a_killed_job_are_deleted_by_the_next(empty_redis, index, tmp_path):
    """Its reference expires. A job with other data deletes its data set, but not that of a running job."""
    script = SCRIPT.format(root=str(ROOT), folder=index.folder, url=empty_redis.url())
    job = start("-c", script)
    try:
        assert job.stdout.readline() == "ready\n"
    finally:
        job.kill()
        finish(job, None)
    other = image_folder.load(str(pictures.make(tmp_path / "other", 3, 1)), "train", str(tmp_path / "cache"))
    client = empty_redis.client()
    assert len(client.keys("*decoded256:[0-9]*")) == 2
    with Opened(empty_redis.url(), index) as tool:
        until(lambda: not any(each.references for each in tool.sets()))
    with Opened(empty_redis.url(), other, "active") as opened:
        until(lambda: not client.keys("*decoded256:[0-9]*"))
        until(lambda: [each.name for each in opened.sets()] == [opened.store.name])
    assert client.dbsize() == 0
