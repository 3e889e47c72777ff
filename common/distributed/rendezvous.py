"""Connect the processes of a job, and check that they were started with the same layout.

Rank 0 holds a torch TCPStore at the platform's address. Every process writes its rank and its layout there.
A value that contradicts an earlier one is an error with both values; ranks that do not arrive in time are
listed. Every wait here has a limit of its own: a TCPStore that reaches another kind of server waits for ever,
even with a time-out (torch 2.14), so a thread ends the process.
"""

import contextlib
import datetime
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import torch

from common.distributed.launcher import STORE_HOLDER
from common.ground.exits import NO_RENDEZVOUS, BadInput, NoRendezvous, leave, print_line, say_error
from common.ground.heartbeat import Heartbeat
from common.platform import interfaces
from common.platform.platforms import is_first_on_node
from common.platform.topology import Topology

_POLL = 0.1  # seconds
_HEARTBEAT = 10.0  # seconds between lines while waiting: a silent job looks like one that hangs
_BUSY = 10.0  # seconds for a port to become free: after a restart the old process may still hold it
_ASKED = 10_000  # ranks that are checked one by one, so that the check takes seconds
_ANSWER = 20.0  # seconds for a server that accepts connections to answer as a store


def meet(topology: Topology, timeout: float, backend: str) -> torch.distributed.Store:
    """Wait for all processes of the job and return the store that they share.

    timeout: seconds for the whole call. backend: the backend that this process will use. Raises BadInput if
    the settings of the processes contradict each other, and NoRendezvous if a process cannot be reached or
    does not arrive.
    """
    if topology.world_size == 1:
        return torch.distributed.HashStore()
    deadline = time.monotonic() + timeout
    store = _connect(topology, timeout, deadline)
    # A restarted job must not read the old values if torchrun's agent keeps its store. Rank 0's own store is
    # new, and then the counts may differ: an agent that came later has restarted less often.
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_kept else "0"
    store = torch.distributed.PrefixStore(f"bootfile/{attempt}", store)
    bound = deadline - time.monotonic() + _ANSWER
    try:
        with _watchdog(bound, lambda: f"the store at {_address(topology)} stopped answering"):
            _claim(store, topology, backend)
            _wait_for_all(store, topology, timeout, deadline)
    except RuntimeError as error:
        raise NoRendezvous(
            f"rank {topology.rank}: the store at {_address(topology)} closed while waiting for the other "
            f"processes ({str(error).splitlines()[0]}); see the log of rank 0"
        ) from error
    return store


def count_different(store: torch.distributed.Store, topology: Topology, name: str, timeout: float) -> int:
    """Return the number of different names that the processes have. Call it on every rank after meet().
    timeout: seconds. Raises NoRendezvous."""
    if store.add(f"name/{name}", 1) == 1:  # the first process with this name
        store.add("names", 1)
    store.add("named", 1)
    deadline = time.monotonic() + timeout
    while store.add("named", 0) < topology.world_size:
        if time.monotonic() > deadline:
            raise NoRendezvous("a process exited after all had arrived: see its log")
        time.sleep(_POLL)
    return store.add("names", 0)


def _connect(topology: Topology, timeout: float, deadline: float) -> torch.distributed.Store:
    others = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or STORE_HOLDER in os.environ
    holds_it = topology.rank == 0 and not others
    port = topology.master_port
    host = topology.master_host if topology.nodes > 1 or others else "127.0.0.1"  # one node needs no network
    assert host and port  # with several processes topology.resolve() has checked it
    addresses = _resolve(host, port, deadline, timeout)
    family, address = addresses[0]
    listener = _listen(topology, addresses, timeout) if holds_it else None
    if not listener:
        _reach(topology, family, address, deadline, timeout)
    bound = min(_ANSWER, timeout)
    with _watchdog(bound, lambda: _what_answers(topology, family, address, bound)):
        store = torch.distributed.TCPStore(
            address[0],
            port,
            is_master=holds_it,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout),
            master_listen_fd=listener.detach() if listener else None,
        )
        # torch 2.1 connects without waiting for an answer, and accepts any bytes as an answer.
        if not 0 < store.add("greetings", 1) < 2**31:
            raise NoRendezvous(_what_answers(topology, family, address, bound))
        return store


def _resolve(host: str, port: int, deadline: float, timeout: float) -> list[tuple[int, tuple]]:
    """Return every (address family, socket address) of the host, the preferred one first. It retries, because
    the name of a headless service may exist only after its pod has started."""
    heartbeat = Heartbeat(_HEARTBEAT, _print_on_first)
    while True:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return [(family, address) for family, _, _, _, address in entries]
        except (OSError, UnicodeError) as error:
            if time.monotonic() + 1 > deadline:
                raise NoRendezvous(
                    f"the master's host name {host} does not resolve on {socket.gethostname()} "
                    f"({getattr(error, 'strerror', None) or error}; tried for {timeout:.0f} s)"
                ) from error
        heartbeat.beat(f"waiting for the host name {host} to resolve")
        time.sleep(1)


def _listen(topology: Topology, addresses: list[tuple[int, tuple]], timeout: float) -> socket.socket:
    """Return the listening socket of rank 0. It is bound to the master's address, because the store has no
    password. It listens on every interface if this node does not have that address (a service, NAT), or if
    the other nodes may use another one."""
    family, address = addresses[0]
    # A name that is loopback in the /etc/hosts of this node has another address on the other nodes.
    inside = topology.nodes == 1 or interfaces.is_loopback(topology.master_host or "")
    bound = inside or (len(addresses) == 1 and not interfaces.is_loopback(address[0]))
    deadline = time.monotonic() + min(_BUSY, timeout)
    while True:
        try:
            if bound:
                return socket.create_server(address, family=family)
            dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            return socket.create_server(("", topology.master_port), family=family, dualstack_ipv6=dual)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL and not inside:
                bound = False
                continue
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise NoRendezvous(
                    f"rank 0 cannot listen on port {topology.master_port} of {socket.gethostname()}: "
                    f"{os.strerror(error.errno or 0)} (another program, or another rank 0, uses it)"
                ) from error
        time.sleep(0.5)


def _reach(topology: Topology, family: int, address: tuple, deadline: float, timeout: float) -> None:
    """Wait until a server accepts connections at the master's address."""
    heartbeat = Heartbeat(_HEARTBEAT, _print_on_first)
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(max(0.1, min(5.0, deadline - time.monotonic())))
            try:
                probe.connect(address)
                return
            except OSError as error:
                if time.monotonic() + _POLL > deadline:
                    raise NoRendezvous(
                        f"rank {topology.rank} cannot reach rank 0 at {_address(topology)} "
                        f"({error.strerror or error}; tried for {timeout:.0f} s): rank 0 is missing, or the "
                        "address is that of another node"
                    ) from error
        heartbeat.beat(f"waiting for rank 0 at {_address(topology)}")
        time.sleep(0.2)


def _what_answers(topology: Topology, family: int, address: tuple, bound: float) -> str:
    answer = "does not answer"
    with contextlib.suppress(OSError), socket.create_connection(address[:2], timeout=1) as probe:
        probe.sendall(b"GET / HTTP/1.0\r\n\r\n")
        if probe.recv(5) == b"HTTP/":
            answer = "is an HTTP server"
    return (
        f"the server at {_address(topology)} {answer}: it is not the store of this job's rank 0 "
        f"(waited {bound:.0f} s), another program uses the port"
    )


def _claim(store: torch.distributed.Store, topology: Topology, backend: str) -> None:
    """Write the layout and the rank to the store. Raises BadInput if they contradict earlier values."""
    own = {"host": socket.gethostname(), "pid": os.getpid(), "node_rank": topology.node_rank}
    layout = own | {
        "nodes": topology.nodes, "processes_per_node": topology.processes_per_node, "backend": backend,
    }  # fmt: skip
    first = json.loads(store.compare_set("layout", "", json.dumps(layout)))
    meanings = {
        "processes_per_node": "processes per node",
        "nodes": "nodes (world size)",
        "backend": "as backend",
    }
    for name, meaning in meanings.items():
        if first[name] != layout[name]:
            _refuse(
                store,
                topology,
                f"node {topology.node_rank} on {own['host']} got {layout[name]} {meaning}, but node "
                f"{first['node_rank']} on {first['host']}, which arrived first, got {first[name]}",
            )
    first = json.loads(store.compare_set(f"rank/{topology.rank}", "", json.dumps(own)))
    if first != own:
        _refuse(
            store,
            topology,
            f"two processes have rank {topology.rank}: process {first['pid']} on {first['host']} and "
            f"process {own['pid']} on {own['host']}; two nodes have the same rank, or one was "
            "restarted without the others",
        )
    store.add(f"arrived/{topology.rank}", 1)
    store.add("arrived", 1)


def _refuse(store: torch.distributed.Store, topology: Topology, text: str) -> None:
    """Send the error to the other processes, and raise BadInput: the job needs all processes to begin."""
    store.set("refusal", text)
    store.add("refused", 1)
    _linger(topology)
    raise BadInput(text)


def _wait_for_all(
    store: torch.distributed.Store, topology: Topology, timeout: float, deadline: float
) -> None:
    heartbeat = Heartbeat(_HEARTBEAT, _print_on_first)
    while store.add("arrived", 0) < topology.world_size:
        if store.add("refused", 0):
            text = store.get("refusal").decode()
            _linger(topology)
            raise BadInput(text)
        if time.monotonic() > deadline:
            asked = range(min(topology.world_size, _ASKED))
            absent = [rank for rank in asked if not store.add(f"arrived/{rank}", 0)]
            count = topology.world_size - store.add("arrived", 0)
            _linger(topology)
            nodes = sorted({rank // topology.processes_per_node for rank in absent})
            raise NoRendezvous(
                f"{count} of {topology.world_size} processes did not arrive within {timeout:.0f} s: "
                f"{_ranges('rank', absent)} ({_ranges('node', nodes)})"
                + (f", and others above rank {_ASKED - 1}" if topology.world_size > _ASKED else "")
            )
        missing = topology.world_size - store.add("arrived", 0)
        heartbeat.beat(f"waiting for {missing} of {topology.world_size} processes")
        time.sleep(_POLL)


def _linger(topology: Topology) -> None:
    """Wait a second on rank 0, so that the others can read the error before the store ends with it."""
    if topology.rank == 0:
        time.sleep(1)


def _ranges(name: str, numbers: list[int]) -> str:
    """Return a text for a list of numbers: [1, 2, 3, 7] -> "ranks 1-3, 7"."""
    parts, start = [], None
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        start = number if start is None else start
        if following != number + 1:
            parts.append(str(start) if start == number else f"{start}-{number}")
            start = None
    return f"{name}{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"


def _print_on_first(line: str) -> None:
    if is_first_on_node():
        print_line(line)


@contextlib.contextmanager
def _watchdog(seconds: float, explain: Callable[[], str]) -> Iterator[None]:
    """End the process with the message explain() if the body takes longer than `seconds`. Python cannot
    interrupt a blocked call of the store."""

    def expire() -> None:
        say_error(explain())
        leave(NO_RENDEZVOUS)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _address(topology: Topology) -> str:
    return f"{topology.master_host}:{topology.master_port}"
