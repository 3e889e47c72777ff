"""A wrong launch ends soon with one line that names the wrong value, before the first training step."""

import contextlib
import http.server
import os
import re
import signal
import socket
import socketserver
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bootfile.ground.errors import BadInput
from common.distributed import barrier, launcher, rendezvous
from common.platform.topology import Topology
from tests.conftest import (
    LONGEST,
    QUICK,
    environment,
    finish,
    free_port,
    names,
    processes_of,
    read_until,
    run,
    start,
)

JOB = ("jobs/train_ddp.py", *QUICK, "--max_steps=2", "--batch_size=24", "--timeout=3")

# For tests in which all processes arrive: a busy machine starts them seconds apart.
PATIENT = (f"--timeout={LONGEST}",)
RUN = """
import os, runpy, sys
sys.path.insert(0, "")
from bootfile.ground import heartbeat
from common.distributed import barrier
folder, sys.argv = sys.argv[1], sys.argv[2:]
CHANGE
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# the clock of a barrier stands still until two processes are there; then the time is over
TWO_ARE_THERE = RUN.replace("CHANGE", """
class Clock(barrier.Heartbeat):
    seconds = property(lambda clock: 1000 * (len(os.listdir(folder)) == 2))
    def __init__(self):
        super().__init__()
        open(os.path.join(folder, os.environ["RANK"]), "w").close()
barrier.Heartbeat = Clock
""")  # fmt: skip
SAYS_THAT_IT_WAITS = RUN.replace("CHANGE", "heartbeat.EVERY = 2.0")


def _node(port, rank, world_size, *more, host="127.0.0.1", before=(), **options):
    place = (f"--init_method=tcp://{host}:{port}", f"--rank={rank}", f"--world_size={world_size}")
    return start(*before, *JOB, *place, *more, **options)


def _errors(process, code):
    result = finish(process, code)
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


def _one_error(process, code):
    line, = _errors(process, code)  # fmt: skip
    return line


@pytest.mark.parametrize(
    ("rank", "world_size", "host", "message"),
    [
        (0, 3, "127.0.0.1", r"\b4 of 6 .*not arrive .*N s: .*\[2, 3, 4, 5\]"),
        (
            1,
            2,
            "127.0.0.1",
            r"rank 1 cannot reach rank 0 .*127.0.0.1:PORT: .*\(Connection refused; tried for \d+ s\)",
        ),
        (1, 2, "nowhere.invalid", "master.* nowhere.invalid .*not resolve"),
    ],
)
def test_a_node_that_is_missing(rank, world_size, host, message, tmp_path):
    port, more, before = free_port(), (), ()
    if rank == 0:
        (tmp_path / "there").mkdir()
        more, before = ("--processes_per_node=2", *PATIENT), ("-c", TWO_ARE_THERE, tmp_path / "there")
    more += (f"--output_dir={tmp_path / 'out'}",)
    error = _one_error(_node(port, rank, world_size, *more, host=host, before=before), 4)
    error = re.sub(r"within \d+ s", "within N s", error)  # what the connection has left
    assert re.search(message.replace("PORT", str(port)), error)


def test_duplicate_rank(tmp_path):
    port = free_port()
    nodes = [_node(port, rank, 3, *PATIENT, f"--output_dir={tmp_path}") for rank in (0, 1, 1)]
    errors = [error for node in nodes for error in _errors(node, 2)]
    assert len(errors) == 3 and all("two processes have rank 1: process" in error for error in errors)


def test_a_rank_that_is_replaced_waits_for_the_others(monkeypatch):
    """Its node was lost, and the others do not know yet: it must not be refused as a second rank 1."""
    waits = threading.Event()
    monkeypatch.setattr(rendezvous.Heartbeat, "beat", lambda _, text: "earlier" in text and waits.set())
    port = free_port()
    stores = {}

    def meet(name, rank):
        place = Topology(rank, 2, 1, None, "127.0.0.1", port, "node", "plain")
        stores[name] = rendezvous.meet(place, LONGEST, "gloo")

    def begin(name, rank):
        thread = threading.Thread(target=meet, args=(name, rank), daemon=True)
        thread.start()
        return thread

    for thread in [begin("first", 0), begin("second", 1)]:
        thread.join(LONGEST)
    replaced = begin("replaced", 1)
    assert waits.wait(LONGEST) and "replaced" not in stores
    stores.clear()  # the end of both
    meet("first again", 0)
    replaced.join(LONGEST)
    stores["replaced"].set("key", "value")
    assert stores["first again"].get("key") == b"value"


@pytest.mark.parametrize("last", [2, 1], ids=["before the last one", "after the last one"])
def test_a_rank_that_is_replaced_while_the_others_still_come_takes_its_place(last, tmp_path):
    """As a pod that is evicted before all pods are there."""
    port = free_port()
    options = (*PATIENT, f"--output_dir={tmp_path}")
    first = _node(port, 0, 3, *options, before=("-c", SAYS_THAT_IT_WAITS, ""))
    lost = _node(port, 1, 3, *options)
    read_until(first, "waiting for 1 of 3 processes")
    lost.kill()
    lost.wait()
    others = [_node(port, 3 - last, 3, *options)]
    if last == 1:  # all have come once, and one of them has ended
        read_until(first, "waiting for 1 of 3 processes to answer")
    for node in (*others, _node(port, last, 3, *options), first):
        finish(node)


def _meet(port, node, processes=1, local=0, timeout=LONGEST):
    place = Topology(node, 2, processes, local, "127.0.0.1", port, "process", "plain")
    return rendezvous.meet(place, timeout, "gloo")


def test_a_start_with_a_larger_layout_is_not_an_earlier_one(monkeypatch):
    """All processes that node 1 expects are there, as node 0 has two: node 1 must not wait for their end."""
    are_there = threading.Event()
    monkeypatch.setattr(barrier.Heartbeat, "beat", lambda _, text: "2 of 4" in text and are_there.set())
    port = free_port()
    with ThreadPoolExecutor() as pool:
        found = [pool.submit(_meet, port, 0, 2, local) for local in range(2)]
        assert are_there.wait(LONGEST)
        for future in (*found, pool.submit(_meet, port, 1)):
            with pytest.raises(BadInput, match=r"got 1 processes per node, .* got 2"):
                future.result()


def test_a_wait_for_an_earlier_start_that_does_not_answer_ends(monkeypatch):
    """The machine of rank 0 has stopped: a call of its store never returns."""
    ends = threading.Event()
    monkeypatch.setattr(rendezvous, "leave", lambda code: ends.set())
    monkeypatch.setattr(rendezvous, "_ANSWER", 1.0)
    is_earlier = lambda _, topology: topology.rank == 1 and not ends.is_set()  # noqa: E731
    monkeypatch.setattr(rendezvous, "_is_of_earlier_start", is_earlier)
    monkeypatch.setattr(rendezvous, "_wait_for_end", lambda *_: ends.wait(LONGEST))
    port = free_port()
    with ThreadPoolExecutor() as pool:
        pool.submit(_meet, port, 0)
        pool.submit(_meet, port, 1, timeout=1.0)
        assert ends.wait(LONGEST / 2)


@pytest.mark.parametrize(
    ("nodes", "processes", "said"),
    [
        ((2, 3), (1, 1), r"got [23] nodes .*node .* got [23]"),
        ((2, 2), (1, 2), r"got [12] processes per node.*node .* got [12]"),
    ],
)
def test_layouts_that_differ(nodes, processes, said, tmp_path):
    port, more, started = free_port(), (*PATIENT, f"--output_dir={tmp_path}"), []
    for rank in range(2):
        place = (rank, nodes[rank], *more, f"--processes_per_node={processes[rank]}")
        started.append(_node(port, *place))
    for node in started:
        assert re.search(said, _one_error(node, 2))


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True  # an open connection must not delay the end


class Silent(socketserver.BaseRequestHandler):
    def handle(self):
        while self.request.recv(1 << 16):
            pass


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("handler", "rank", "message"),
    [
        (Silent, 1, "server .*127.0.0.1:PORT .*not answer"),
        (http.server.BaseHTTPRequestHandler, 1, "server .*127.0.0.1:PORT .*not answer"),
        (Silent, 0, "rank 0 .*listen .*PORT .*Address already in use"),
    ],
)
def test_another_server_on_the_port(handler, rank, message):
    with Server(("127.0.0.1", 0), handler) as server:
        port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        error = _one_error(_node(port, rank, 2), 4)
        server.shutdown()
    assert re.search(message.replace("PORT", str(port)), error)


@pytest.mark.thorough
def test_a_late_node_is_waited_for(tmp_path):
    """Rank 1 waits until rank 0 opens the port."""
    port = free_port()
    options = (*PATIENT, f"--output_dir={tmp_path}")
    second = _node(port, 1, 2, *options, before=("-c", SAYS_THAT_IT_WAITS, ""))
    read_until(second, "^waiting for rank 0 at ")
    finish(_node(port, 0, 2, *options))
    finish(second)


def test_a_job_of_one_process_refuses_to_be_several(tmp_path):
    names_and_values = "RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1"
    launched = dict(each.split("=") for each in names_and_values.split())
    result = run("jobs/train.py", *QUICK, "--output_dir", tmp_path, env=environment(**launched), code=2)
    assert names(result.stderr, "one process", "launcher started 2", "jobs/train_ddp.py")


LONG = ("--max_steps=100000", "--epochs=100000", "--report_every=1")


@pytest.mark.thorough
def test_survivors_of_a_lost_process_exit(tmp_path):
    port = free_port()
    more = ("--processes_per_node=2", *LONG, "--timeout=1000", f"--output_dir={tmp_path}")
    nodes = [_node(port, rank, 2, *more) for rank in range(2)]
    assert any(" step=3/" in line for line in nodes[0].stdout), finish(nodes[0], None).stderr
    lost = processes_of(nodes[1])[1]
    os.kill(lost, signal.SIGKILL)
    errors = [_errors(node, None) for node in nodes]
    assert nodes[0].returncode == 5 and nodes[1].returncode not in (0, None)
    assert any("lost contact with another process" in error for error in errors[0])
    assert not os.path.exists(f"/proc/{lost}"), "no process is left"


def test_a_master_with_a_new_address_is_found(monkeypatch):
    """As the pod of node 0 that is replaced while the others start: it has the same name, another address."""
    waits = threading.Event()
    old = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.9", 1))]
    look_up = socket.getaddrinfo

    def get_address(*place, **options):
        return look_up(*place, **options) if waits.is_set() else old

    monkeypatch.setattr(socket, "getaddrinfo", get_address)
    monkeypatch.setattr(rendezvous, "_POLL", 0.01)
    monkeypatch.setattr(rendezvous.Heartbeat, "beat", lambda _, text: waits.set())
    server, host, port = launcher.hold_store()
    place = Topology(1, 2, 1, None, host, port, "node", "plain")
    store = rendezvous.connect(place, 10, time.monotonic() + 10)
    store.set("key", "value")
    assert waits.is_set() and server.get("key") == b"value"


@pytest.mark.parametrize(
    "host, found, bound",
    [
        ("127.0.0.2", ["127.0.0.2"], "127.0.0.2"),
        ("node-0", ["127.0.1.1"], "0.0.0.0"),  # by this node's /etc/hosts only
        ("node-0", ["127.0.0.2", "127.0.0.3"], "0.0.0.0"),  # another node may take the second
        ("service", ["192.0.2.1"], "0.0.0.0"),  # not an address of this node
    ],
)
def test_where_rank_0_listens(host, found, bound):
    topology = Topology(0, 2, 1, None, host, free_port(), "node", "plain")
    found = [(socket.AF_INET, (address, topology.master_port)) for address in found]
    with rendezvous._listen(topology, found, 1) as listener:
        assert listener.getsockname() == (bound, topology.master_port)


PROBE = """
import socket
def refused(host):
    with socket.socket() as probe:
        return probe.connect_ex((host, 23456)) != 0
while refused("127.0.0.2"):
    pass
assert refused("127.0.0.1")
"""


def test_the_store_is_at_the_masters_address_only(tmp_path):
    port = free_port()
    given = (*PATIENT, f"--output_dir={tmp_path}")
    master = _node(port, 0, 2, *given, host="127.0.0.2")
    finish(start("-c", PROBE.replace("23456", str(port))))
    finish(_node(port, 1, 2, *given, host="127.0.0.2"))
    finish(master)


@pytest.mark.parametrize(
    "version, is_old", [("2.1.0", False), ("2.4.1", True), ("2.7.1", True), ("2.10.0", False)]
)
def test_a_store_that_gets_a_socket(version, is_old):
    version = torch.torch_version.TorchVersion(version)
    assert launcher.store_options(version) == ({"use_libuv": False} if is_old else {})


def test_only_the_user_of_the_job_on_its_node_knows_the_token(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous.tempfile, "tempdir", str(tmp_path))
    store = torch.distributed.HashStore()
    with contextlib.ExitStack() as folders:
        first, second = (rendezvous._share_token(store, folders) for _ in range(2))
        assert first == second and len(first) == 32 and first not in store.get("token file").decode()
        assert all(not path.stat().st_mode & 0o077 for path in tmp_path.iterdir())
    assert not [*tmp_path.iterdir()]
    with contextlib.ExitStack() as folders:
        assert rendezvous._share_token(store, folders) == "", "as on another node"
    assert store.add("without token", 0) == 1
