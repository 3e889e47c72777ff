"""A wrong launch ends soon with one line that names the wrong value, before the first training step."""

import http.server
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from common.distributed import rendezvous
from common.platform.topology import Topology
from launch.simulate.network import Network
from tests.conftest import QUICK, ROOT, environment, finish, free_port, processes_of, run, start

JOB = ("jobs/train_ddp.py", *QUICK, "--max_steps=2", "--batch_size=24", "--timeout=3")

# For tests in which all processes arrive: a busy machine starts them seconds apart.
PATIENT = ("--timeout=60",)


def _node(port, rank, world_size, *more, host="127.0.0.1", **options):
    return start(
        *JOB,
        f"--init_method=tcp://{host}:{port}",
        f"--rank={rank}",
        f"--world_size={world_size}",
        *more,
        **options,
    )


def _errors(process, code):
    result = finish(process, code)
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


def _one_error(process, code):
    line, = _errors(process, code)  # fmt: skip
    return line


def test_missing_ranks_are_listed(tmp_path):
    node = _node(free_port(), 0, 3, "--processes_per_node=2", f"--output_dir={tmp_path}")
    assert "4 of 6 processes did not arrive within 3 s: ranks 2-5 (nodes 1-2)" in _one_error(node, 4)


def test_missing_rank_0(tmp_path):
    port = free_port()
    error = _one_error(_node(port, 1, 2, f"--output_dir={tmp_path}"), 4)
    assert f"rank 1 cannot reach rank 0 at 127.0.0.1:{port} (Connection refused; tried for 3 s)" in error


def test_duplicate_rank(tmp_path):
    port = free_port()
    nodes = [_node(port, rank, 3, *PATIENT, f"--output_dir={tmp_path}") for rank in (0, 1, 1)]
    errors = [error for node in nodes for error in _errors(node, 2)]
    assert len(errors) == 3 and all("two processes have rank 1: process" in error for error in errors)


@pytest.mark.parametrize(
    ("nodes", "processes", "said"),
    [
        ((2, 3), (1, 1), r"got [23] nodes \(world size\), but node .* got [23]"),
        ((2, 2), (1, 2), r"got [12] processes per node, but node .* got [12]"),
    ],
)
def test_layouts_that_differ(nodes, processes, said, tmp_path):
    port, more = free_port(), (*PATIENT, f"--output_dir={tmp_path}")
    started = [
        _node(port, rank, nodes[rank], *more, f"--processes_per_node={processes[rank]}") for rank in range(2)
    ]
    for node in started:
        assert re.search(said, _one_error(node, 2))


def test_host_that_does_not_resolve():
    error = _one_error(_node(23456, 1, 2, host="nowhere.invalid"), 4)
    assert "the master's host name nowhere.invalid does not resolve on" in error and "tried for 3 s" in error


@pytest.fixture
def foreign_server(request):
    """Yield a port of another server: "silent" accepts and sends nothing, "http" is a web server."""
    if request.param == "silent":
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield server.getsockname()[1]
        return
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "foreign_server, found",
    [("silent", "does not answer"), ("http", "is an HTTP server")],
    indirect=["foreign_server"],
)
def test_another_server_on_the_port(foreign_server, found):
    error = _one_error(_node(foreign_server, 1, 2), 4)
    assert f"the server at 127.0.0.1:{foreign_server} {found}" in error


@pytest.mark.parametrize("foreign_server", ["silent"], indirect=True)
def test_port_taken(foreign_server):
    error = _one_error(_node(foreign_server, 0, 2), 4)
    assert f"rank 0 cannot listen on port {foreign_server}" in error and "Address already in use" in error


def test_a_late_node_is_waited_for(tmp_path):
    """Rank 1 waits until rank 0 opens the port."""
    port = free_port()
    options = ("--timeout=60", f"--output_dir={tmp_path}")
    second = _node(port, 1, 2, *options)
    time.sleep(4)
    assert second.poll() is None
    finish(_node(port, 0, 2, *options))
    finish(second)


@pytest.mark.parametrize("job", ["train.py", "train_dp.py", "train_amp.py"])
def test_a_job_of_one_process_refuses_to_be_several(job, tmp_path):
    launched = dict(
        RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="h", MASTER_PORT="1"
    )
    result = run(f"jobs/{job}", *QUICK, "--output_dir", tmp_path, env=environment(**launched), code=2)
    assert "this job is one process, but launcher started 2: use jobs/train_ddp.py" in result.stderr


LONG = ("--max_steps=100000", "--epochs=100000", "--report_every=1")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.faults)])
def test_survivors_of_a_lost_process_exit(number, tmp_path):
    """If node 1 loses one of two processes, all others exit: at once after SIGKILL, after the time-out when
    it was stopped."""
    port = free_port()
    patience = 60 if number == signal.SIGKILL else 15  # a busy machine needs seconds for a connection
    more = ("--processes_per_node=2", *LONG, f"--timeout={patience}", f"--output_dir={tmp_path}")
    nodes = [_node(port, rank, 2, *more) for rank in range(2)]
    assert any(" step=3 " in line for line in nodes[0].stdout), finish(nodes[0], None).stderr
    lost = processes_of(nodes[1])[1]
    os.kill(lost, number)
    begin = time.monotonic()
    errors = [_errors(node, None) for node in nodes]
    seconds = time.monotonic() - begin
    assert all(node.returncode not in (0, None) for node in nodes)
    assert nodes[0].returncode == 5 and any(
        "lost contact with another process" in error for error in errors[0]
    )
    assert number == signal.SIGSTOP or seconds < patience
    assert not os.path.exists(f"/proc/{lost}"), "no process is left"


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
while refused("10.77.0.1"):
    pass
assert refused("127.0.0.1")
"""


def test_the_store_is_at_the_masters_address_only(namespaces, tmp_path):
    with Network(2) as network:

        def on(node, *command):
            command = network.command(node, [sys.executable, *command])
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            return subprocess.Popen(command, cwd=ROOT, env=environment(), **pipes)

        given = (*JOB, *PATIENT, "--init_method=tcp://10.77.0.1:23456", "--world_size=2")
        first = on(0, *given, "--rank=0", f"--output_dir={tmp_path}")
        finish(on(0, "-c", PROBE))
        finish(on(1, *given, "--rank=1", f"--output_dir={tmp_path}"))
        finish(first)
