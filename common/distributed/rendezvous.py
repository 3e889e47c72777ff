"""Connect the processes of a job, and check that they were started with the same layout.

Rank 0 holds a torch TCPStore at the platform's address. Every process writes its rank and its layout there.
A value that contradicts an earlier one is an error with both values; ranks that do not arrive in time are
listed. Every wait here has a limit of its own: a TCPStore that reaches another kind of server waits for ever,
even with a time-out (torch 2.14), so a thread ends the process.
"""

import contextlib
import datetime
import errno
import functools
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from bootfile.ground.errors import BadInput, leave
from bootfile.ground.files import opener, write_atomic
from bootfile.ground.heartbeat import Heartbeat, alarm
from bootfile.processes import signals, texts
from bootfile.processes.ends import start_of
from common.distributed import barrier
from common.distributed.launcher import AGENT_STORE, store_options
from common.ground.endings import NO_RENDEZVOUS, NoRendezvous, say_error
from common.platform import network
from common.platform.place import has_local_rank_0
from common.platform.topology import Topology

_PREFIX = "bootfile/{}"  # before the keys of one start
_START = "start"  # the barrier at which all ranks arrive, in hours perhaps
_ANSWERS = "answers"  # that at which all answer at once: a rank that arrived may have ended since
_PORT = "bootfile/port"  # that of rank 0, in the store of torchrun's agents
_POLL = 0.2  # seconds
_BUSY = 10.0  # seconds for a port to become free: after a restart the old process may still hold it
_ANSWER = 20.0  # seconds for a server that accepts connections to answer as a store
T = TypeVar("T")


def meet(topology: Topology, timeout: float, backend: str) -> torch.distributed.Store:
    """Wait for all processes of the job and return the store that they share.

    Every rank calls it in process_group.meet(), before a process group exists.

    timeout: seconds for the whole call. backend: the backend that this process will use. Raises BadInput if
    the settings of the processes contradict each other, and NoRendezvous if a process cannot be reached or
    does not arrive.
    """
    if topology.world_size == 1:
        return torch.distributed.HashStore()
    # of all that follows: name, connection, and the wait for the other ranks
    deadline = time.monotonic() + timeout
    # rank 0 listens here, unless torchrun's agent does; the others try until it does
    store = connect(topology, timeout, deadline)
    bound = deadline - time.monotonic() + _ANSWER
    no_answer = f"the store at {_address(topology)} stopped answering"
    with _watchdog(bound, no_answer):
        while _is_of_earlier_start(store, topology):
            _wait_for_end(store, deadline)
            store = connect(topology, timeout, deadline)
    # A restarted job must not read the old values if torchrun's agent keeps its store. That of rank 0 is new.
    attempt = "0"
    if _parent_holds_store(topology):
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", attempt)
    else:  # from here on it is wrong, if torchrun has set it
        os.environ.pop(AGENT_STORE, None)
    store = torch.distributed.PrefixStore(_PREFIX.format(attempt), store)
    try:
        with _watchdog(bound, no_answer), contextlib.ExitStack() as folders:
            token = _share_token(store, folders)
            # not raised here: the other ranks would wait at the barrier for this one
            error, world_size = _claim(store, topology, backend)
            rest = deadline - time.monotonic()
            barrier.gather(store, _START, "", error, topology.rank, world_size, rest)
            # until here a process that replaces one that has ended counts in its place
            rest = max(deadline - time.monotonic(), _ANSWER / 2)
            barrier.gather(store, _ANSWERS, "to answer", None, topology.rank, world_size, rest)
            if store.add("without token", 0):  # some ranks cannot read it: requests to stop have none
                token = ""
            # from here on a request to stop in the store is believed only with this token
            signals.identify(topology.rank, token)
    except RuntimeError as error:
        raise NoRendezvous(
            f"rank {topology.rank}: the store at {_address(topology)} closed while waiting for the other "
            f"processes ({str(error).splitlines()[0]}); see the log of rank 0"
        ) from error
    return store


def _is_of_earlier_start(store: torch.distributed.Store, topology: Topology) -> bool:
    """Return whether this rank has already met the others in this store: a scheduler has replaced a lost
    process before the others have noticed its loss. The store of torchrun's agent is not one of a start."""
    if topology.rank == 0 or _parent_holds_store(topology):
        return False
    store = torch.distributed.PrefixStore(_PREFIX.format(0), store)
    answers = torch.distributed.PrefixStore(_ANSWERS, store)
    with contextlib.suppress(RuntimeError):  # it closes now: the next one is that of this start
        layout = texts.read(store, "layout")
        # _claim() reports another layout: some of its processes may be as many as all of this one's
        is_same = bool(layout) and _world_size(json.loads(layout)) == topology.world_size
        return is_same and answers.add("here", 0) >= topology.world_size
    return True


def _parent_holds_store(topology: Topology) -> bool:
    """Return whether the store is that of the process that has started this one. Several agents of torchrun
    have one, too, but each counts its own restarts: they cannot tell which values in it are of this start."""
    return topology.nodes == 1 and os.environ.get(AGENT_STORE) == "True"


def _wait_for_end(store: torch.distributed.Store, deadline: float) -> None:
    """Wait until rank 0 of an earlier start has ended, and its store with it. Raises NoRendezvous."""
    heartbeat = Heartbeat()
    with contextlib.suppress(RuntimeError):  # the store has closed
        while store.add("greetings", 0):
            if time.monotonic() > deadline:
                raise NoRendezvous(
                    "the other processes are those of an earlier start, and did not end: they run without "
                    "this one, or two nodes have the same rank"
                )
            if has_local_rank_0():
                heartbeat.beat("waiting until the other processes of the earlier start have ended")
            time.sleep(_POLL)


def count_different(store: torch.distributed.Store, topology: Topology, name: str, timeout: float) -> int:
    """Return the number of different names that the processes have. Call it on every rank after meet().
    timeout: seconds. Raises NoRendezvous."""
    if store.add(f"name/{name}", 1) == 1:  # the first process with this name
        store.add("names", 1)
    barrier.gather(store, "named", "to name its GPU", None, topology.rank, topology.world_size, timeout)
    return store.add("names", 0)


def connect(topology: Topology, timeout: float, deadline: float) -> torch.distributed.Store:
    """Return a connection to the store at the master's address, which rank 0 holds.

    Every rank calls it in meet(), and the agent of each node of an elastic job.

    timeout: seconds. deadline: a time of time.monotonic(). Raises NoRendezvous."""
    parent_holds_it = _parent_holds_store(topology)
    holds_it = topology.rank == 0 and not parent_holds_it
    port = topology.master_port
    # one node needs no network
    host = "127.0.0.1" if topology.nodes == 1 and not parent_holds_it else topology.master_host
    assert host and port  # with several processes topology.resolve() has checked it
    agents = None
    if topology.nodes > 1 and os.environ.get(AGENT_STORE) == "True":
        # the store of torchrun's agents tells the port of rank 0, which holds the store of this start
        limit = datetime.timedelta(seconds=timeout)
        agents = torch.distributed.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=limit
        )
    if agents and holds_it:
        port = 0  # any that is free
    look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    # the name of a headless service may exist only after its pod has started
    entries = _retry(
        look_up,
        deadline,
        f"waiting for the host name {host} to resolve",
        f"the master's host name {host} does not resolve on {socket.gethostname()}",
    )
    addresses: list[tuple[int, tuple]] = [(family, address) for family, _, _, _, address in entries]

    def reach() -> tuple[str, int]:
        """Return the address and the port at which rank 0 answers."""
        # looked up each time: a pod that replaces that of node 0 has the same name and another address
        place: tuple = look_up()[0][4]
        address, port, *_ = place
        if agents:
            port = int(texts.read(agents, _PORT) or 0)  # 0 refuses the connection
        seconds = max(0.1, min(5.0, deadline - time.monotonic()))
        socket.create_connection((address, port), seconds).close()
        return address, port

    # only rank 0 listens; with the store of torchrun's agent no rank does
    listener = None
    if holds_it:
        listener = _listen(topology, addresses, timeout)
        address, port = addresses[0][1][0], listener.getsockname()[1]
        if agents:
            texts.write(agents, _PORT, str(port))
    else:  # until rank 0 listens; it logs what it waits for, which a TCPStore does not
        address, port = _retry(
            reach,
            deadline,
            f"waiting for rank 0 at {_address(topology)}",
            f"rank {topology.rank} cannot reach rank 0 at {_address(topology)}: rank 0 is missing, or the "
            "address is that of another node",
        )
    bound = min(_ANSWER, timeout)
    no_answer = (
        f"the server at {_address(topology)} does not answer as the store of this job's rank 0 (waited "
        f"{bound:.0f} s): another program uses the port"
    )
    # what listens may be no store at all: then the next calls would never return
    with _watchdog(bound, no_answer):
        store = torch.distributed.TCPStore(
            address,
            port,
            is_master=holds_it,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout),
            master_listen_fd=listener.detach() if listener else None,
            **store_options(),
        )
        # torch 2.1 connects without waiting for an answer, and accepts any bytes as an answer.
        if not 0 < store.add("greetings", 1) < 2**31:
            raise NoRendezvous(no_answer)
        return store


def _listen(topology: Topology, addresses: list[tuple[int, tuple]], timeout: float) -> socket.socket:
    """Return the listening socket of rank 0, which calls it before it makes the store. It is bound to the
    master's address, because the store has no password. It listens on every interface if this node does not
    have that address (a service, NAT), or if the other nodes may use another one."""
    family, address = addresses[0]
    port = address[1]
    # A name that is loopback in the /etc/hosts of this node has another address on the other nodes.
    inside = topology.nodes == 1 or network.is_loopback(topology.master_host or "")

    def listen() -> socket.socket:
        if inside or (len(addresses) == 1 and not network.is_loopback(address[0])):
            try:
                return socket.create_server(address, family=family)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL or inside:
                    raise
        dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual)

    name = f"port {port} of {socket.gethostname()}"
    failure = f"rank 0 cannot listen on {name}: another program, or another rank 0, uses it"
    return _retry(listen, time.monotonic() + min(_BUSY, timeout), f"waiting for {name}", failure)


def _retry(attempt: Callable[[], T], deadline: float, waiting: str, failure: str) -> T:
    """Return attempt(), which is repeated after an OSError. Raises NoRendezvous with the failure and its
    reason when the time.monotonic() of the deadline comes. waiting: the line that is logged meanwhile."""
    heartbeat = Heartbeat()
    while True:
        try:
            return attempt()
        except (OSError, UnicodeError) as error:
            if time.monotonic() + _POLL > deadline:
                reason = getattr(error, "strerror", None) or error
                raise NoRendezvous(f"{failure} ({reason}; tried for {heartbeat.seconds:.0f} s)") from error
        if has_local_rank_0():
            heartbeat.beat(waiting)
        time.sleep(_POLL)


def _world_size(layout: dict[str, Any]) -> int:
    """Return the number of processes of a layout, as _claim() writes it."""
    return int(layout["processes per node"] * layout["nodes (world size)"])


def _claim(store: torch.distributed.Store, topology: Topology, backend: str) -> tuple[BadInput | None, int]:
    """Write the layout and the rank to the store. Return the error if they contradict earlier values, and the
    world size: with an error, that of the larger layout, because all of its ranks may come to read it. Every
    rank calls it before the first barrier, to which it brings the error: then all end with it."""
    pid = os.getpid()
    process = {"host": socket.gethostname(), "pid": pid, "started": start_of(pid)}
    process["node_rank"] = topology.node_rank
    process["spaces"] = [_namespace("pid"), _namespace("net")]
    meanings = {
        "processes per node": topology.processes_per_node,
        "nodes (world size)": topology.nodes,
        "as backend": backend,
    }
    # the first process of all writes its layout, and each later one compares its own with it
    first = json.loads(texts.write_first(store, "layout", json.dumps(process | meanings)))
    world_size = max(topology.world_size, _world_size(first))
    for meaning, value in meanings.items():
        if first[meaning] != value:
            error = BadInput(
                f"node {topology.node_rank} on {process['host']} got {value} {meaning}, but node "
                f"{first['node_rank']} on {first['host']}, which arrived first, got {first[meaning]}"
            )
            return error, world_size
    # two processes with the same rank: the second one finds the name of the first
    first = json.loads(texts.write_first(store, f"rank/{topology.rank}", json.dumps(process)))
    if first == process:
        return None, world_size
    if _is_replaced(first, process):
        # a third one is compared with this one
        texts.write(store, f"rank/{topology.rank}", json.dumps(process))
        return None, world_size
    others = f"process {first['pid']} on {first['host']} and process {process['pid']} on {process['host']}"
    error = BadInput(
        f"two processes have rank {topology.rank}: {others}; two nodes have the same rank, or one was "
        "restarted without the others"
    )
    return error, world_size


def _is_replaced(first: dict[str, Any], process: dict[str, Any]) -> bool:
    """Return whether the process that had this rank first was one of this host, and has ended: a scheduler
    has started this one in its place while others still come. A pod that is replaced keeps its host name."""
    if first["host"] != process["host"] or not process["started"]:
        return False
    (pids, network), (own_pids, own_network) = first["spaces"], process["spaces"]
    if pids != own_pids:  # a pod has a network of its own; two containers that share one may both run
        return bool(network != own_network)
    return start_of(first["pid"]) != first["started"]


def _namespace(kind: str) -> str:
    """Return the identity of a namespace of this process, "pid" or "net"; "" if it is not known."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/ns/{kind}")
    return ""


def _share_token(store: torch.distributed.Store, folders: contextlib.ExitStack) -> str:
    """Return a token that other users of this node cannot know: it is in a private temporary folder of the
    first process, which `folders` deletes. "" if this process cannot read it, for example on another node.
    Every rank calls it before the first barrier; the folder is there until all have arrived at it."""
    with contextlib.suppress(OSError, UnicodeError):
        folder = folders.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        path_of_this_process = os.path.join(folder, "token")
        write_atomic(path_of_this_process, secrets.token_hex(16))
        path = texts.write_first(store, "token file", path_of_this_process)
        with open(path, encoding="ascii", opener=opener) as file:
            token = file.read(32)
            if os.fstat(file.fileno()).st_uid == os.geteuid() and token.isalnum():
                return token
    store.add("without token", 1)
    return ""


def _watchdog(seconds: float, message: str) -> contextlib.AbstractContextManager[None]:
    """End the process with the message if the block takes longer than `seconds`. Python cannot interrupt a
    blocked call of the store, so a thread ends the process."""

    def expire() -> None:
        say_error(message)
        leave(NO_RENDEZVOUS)

    return alarm(seconds, expire)


def _address(topology: Topology) -> str:
    return f"{topology.master_host}:{topology.master_port}"
