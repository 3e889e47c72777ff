"""Whether this node finds the master and can talk to it: the findings `master` and `interface`."""

import concurrent.futures
import errno
import socket
import threading
import time
from collections.abc import Callable

from common.distributed import interfaces
from common.distributed.topology import Topology
from common.preflight.findings import Finding, finding

SECONDS = 3.0  # for resolving names and reaching the master together


def master_to_find(topology: Topology) -> str | None:
    """The host that processes connect to; those of a single node that starts them itself meet on loopback."""
    return topology.master_host if topology.nodes > 1 or topology.level == "process" else None


def findings(env, topology: Topology, master, own, deadline: float) -> list[Finding]:
    """The findings `master` and `interface`. master, own: futures of addresses (master None: one node)."""
    presets = {name: env[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in env}
    shown = "".join(f", {name}={value}" for name, value in presets.items())
    errors = [trouble for name, value in presets.items() if (trouble := _preset_trouble(name, value))]
    if master is None:
        none = finding("master", "none needed: one node", [], [])
        return [none, finding("interface", f"loopback: one node{shown}", errors, [])]
    where = f"{topology.master_host}:{topology.master_port}"
    address, why = _first(master, deadline)
    if address is None:
        unknown = finding("master", where, [f"the master's host name {why}"], [])
        return [unknown, finding("interface", f"not known before the master is{shown}", errors, [])]
    check = _own_port if topology.node_rank == 0 else _other_port
    found = [finding("master", f"{where} is {address[0]}", *check(topology, address, deadline))]
    try:
        name, local = interfaces.interface_to(*address[:2])
    except OSError as error:
        errors.append(f"no way to {address[0]}: {error.strerror}")
        return [*found, finding("interface", f"none{shown}", errors, [])]
    warnings = []
    if topology.nodes > 1 and _loopback(local):
        warnings.append(f"the {topology.nodes} nodes meet at {address[0]}, which works on one machine only")
    elif topology.nodes > 1 and "GLOO_SOCKET_IFNAME" not in presets:
        named, why = _first(own, deadline)
        if named is None or _loopback(named[0]):
            lost = f"{socket.gethostname()}, this host's name, {f'is {named[0]}' if named else why}"
            warnings.append(f"{lost}: gloo would wait there; jobs here set GLOO_SOCKET_IFNAME={name}")
    return [*found, finding("interface", f"{name} with {local}{shown}", errors, warnings)]


def _first(addresses: concurrent.futures.Future, deadline: float) -> tuple[tuple | None, str]:
    """(first socket address, ""), or (None, why there is none)."""
    try:
        return addresses.result(timeout=max(0.0, deadline - time.monotonic()))[0], ""
    except concurrent.futures.TimeoutError:
        return None, f"does not resolve (no answer within {SECONDS:.0f} s)"
    except (OSError, UnicodeError) as error:
        return None, f"does not resolve ({getattr(error, 'strerror', None) or error})"


def _own_port(topology: Topology, address: tuple, deadline: float) -> tuple[list[str], list[str]]:
    """(errors, warnings) of the node that is the master itself."""
    # Processes that a launcher started find its store listening already.
    port = topology.master_port if topology.level == "node" else 0
    with _socket(address) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does
        try:
            probe.bind((address[0], port, *address[2:]))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return [], [f"port {port} is taken on this node: by a job that runs already?"]
            return [], [f"node 0 is the master, but {address[0]} is no address of it: {error.strerror}"]
    return [], []


def _other_port(topology: Topology, address: tuple, deadline: float) -> tuple[list[str], list[str]]:
    """(errors, warnings) of the way from this node to the master's port."""
    seconds = min(1.0, max(0.2, deadline - time.monotonic()))
    with _socket(address) as probe:
        probe.settimeout(seconds)
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            return [], ["not listening yet (refused): start node 0"]
        except TimeoutError:
            return [], [f"no answer within {seconds:.1f} s: not started yet, or a firewall"]
        except OSError as error:
            return [f"cannot be reached: {error.strerror}"], []
    return [], []


def _socket(address: tuple) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)


def _preset_trouble(name: str, value: str) -> str | None:
    """Why a *_SOCKET_IFNAME finds no interface on this node. gloo: exact names, all of them; NCCL: prefixes,
    or exact names after "=", of which one will do; "^" excludes."""
    there = [interface for _, interface in socket.if_nameindex()]
    asked = value.lstrip("=").split(",")
    if name.startswith("NCCL"):
        same = str.__eq__ if value.startswith("=") else str.startswith
        lacking = not value.startswith("^") and not any(same(have, ask) for have in there for ask in asked)
    else:
        lacking = not set(asked) <= set(there)
    return f"{name}={value}, but the interfaces here are {', '.join(there)}" if lacking else None


def addresses(host: str, port: int | None) -> list[tuple]:
    """Socket addresses, at least one. Raises OSError."""
    return [entry[4] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def start(function: Callable, *arguments) -> concurrent.futures.Future:
    """Call in a thread that does not keep the process alive: a name server that is silent blocks for
    minutes."""
    future = concurrent.futures.Future()

    def work():
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def _loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
